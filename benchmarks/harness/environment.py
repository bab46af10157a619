"""Says what `gpu_check.sh` runs on; the exit status is 1 where torch has no CUDA device that it can use."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys

NEEDED = (
    "accelerate",
    "hypothesis",
    "matplotlib",
    "pytest_timeout",
    "rich",
    "safetensors",
    "transformers",
    "typer",
)


def main() -> int:
    """Prints versions and the device; names every package that is missing at once."""
    versions = [f"python {platform.python_version()}"]
    for name in (
        "torch",
        "triton",
        "transformers",
        "pytest",
        "matplotlib",
        "dflash",
        "kernels",
        "flash-attn",
    ):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} -")
    print(" | ".join(versions))
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"missing: {name} ({error})")
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device")
        return 1
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    print(f"{properties.name}, {properties.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}, "
          f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")  # fmt: skip
    ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    value = float((ones @ ones).sum())
    print("a product on the device:", "right" if value == 64**3 else f"WRONG, {value}")
    return 0 if value == 64**3 else 1


if __name__ == "__main__":
    sys.exit(main())
