"""`rope_angles`: the definition against Transformers' module and float64, the kernel against the definition.

NumPy, in Triton's interpreter, and torch round cosines and sines differently: in float32 the results are within two
machine epsilons (2.4e-7) of each other; in 16 bits one in a thousand may be the neighbouring number. A GPU has
torch's own `cosf` and `sinf`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_hf.configuration_dflash import DFlashConfig
from dflash_hf.draft_model.layers import DFlashRotaryEmbedding
from dflash_kernels import rope_angles
from dflash_kernels._dispatch import runs_kernel
from helpers.kernel_checks import CUDA, DEVICES, DTYPES, check_raises, poisoned

pytestmark = pytest.mark.usefixtures("rounding")
# Rows, tokens and frequencies: one of each, numbers that are no power of two, the sizes of real heads.
SHAPES = [(1, 1, 1), (2, 3, 5), (3, 7, 32), (1, 16, 64), (2, 4, 65)]
REAL = [(1, 16, 64), (32, 16, 64), (8, 128, 128)]
# Far beyond any context, where half precision knows no neighbours and quick cosines are wrong.
FAR = 1_000_000


def drawn(batch: int, width: int, num_freqs: int, device: str) -> tuple[Tensor, Tensor]:
    """Positions of all sizes, 0 and a far one among them, and frequencies of RoPE."""
    generator = torch.Generator().manual_seed(batch + width)
    positions = torch.randint(0, FAR, (batch, width), generator=generator)
    positions[0, 0] = 0
    positions[-1, -1] = FAR
    exponents = torch.arange(num_freqs) / num_freqs
    inv_freq = 1 / 10_000.0**exponents
    return positions.to(device), inv_freq.to(device)


def assert_close(ours: Tensor, wanted: Tensor) -> None:
    """Within two machine epsilons of float32, and but for one in a thousand the same number in 16 bits."""
    assert ours.dtype == wanted.dtype
    assert ours.is_contiguous()
    if ours.dtype == torch.float32:
        tolerance = 2 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(ours, wanted, rtol=0, atol=tolerance)
        return
    num_different = int((ours != wanted).sum())
    assert num_different <= max(2, ours.numel() / 1000)
    tolerance = torch.finfo(ours.dtype).eps
    # Next to zero, numbers in 16 bits lie closer than the error of a cosine in float32.
    torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=1e-6)


def check(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """The kernel computes what its definition computes, from poisoned memory."""
    positions, inv_freq = drawn(*shape, device)
    assert runs_kernel(inv_freq)
    for scaling in (1.0, 1.25):
        with poisoned():
            ours = rope_angles(positions, inv_freq, scaling, dtype)
        assert_close(ours, rope_angles.reference(positions, inv_freq, scaling, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_computes_what_the_definition_computes(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    check(shape, dtype, device)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_the_kernel_equals_the_definition_at_real_sizes(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    check(shape, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_those_of_float64(dtype: torch.dtype, device: str) -> None:
    positions, inv_freq = drawn(3, 7, 64, device)
    # The angle is a product in float32 by definition; what comes behind it is compared.
    angles = (positions[..., None].float() * inv_freq).double()
    wanted = torch.stack((angles.cos(), angles.sin())) * 1.25
    ours = rope_angles(positions, inv_freq, 1.25, dtype).double()
    rounding = torch.finfo(dtype).eps / 2
    in_float32 = 2 * torch.finfo(torch.float32).eps
    # Two equal halves: a channel turns with the one half a head further on.
    for half in ours.chunk(2, dim=-1):
        torch.testing.assert_close(half, wanted, rtol=rounding, atol=in_float32)


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides_and_dtypes_of_positions(device: str) -> None:
    positions, inv_freq = drawn(6, 10, 16, device)
    turned = positions.T[::2]
    one_row = positions[:1].expand(4, -1)
    every_other = inv_freq[::2]
    for given in (turned, one_row, positions.int()):
        ours = rope_angles(given, every_other, 1.0, torch.float32)
        assert_close(ours, rope_angles.reference(given, every_other, 1.0, torch.float32))
    rounded = inv_freq.to(torch.bfloat16)
    ours = rope_angles(positions, rounded, 1.0, torch.bfloat16)
    assert_close(ours, rope_angles.reference(positions, rounded, 1.0, torch.bfloat16))


@pytest.mark.parametrize("device", DEVICES)
def test_no_positions_have_no_angles(device: str) -> None:
    positions, inv_freq = drawn(2, 3, 4, device)
    assert rope_angles(positions[:0], inv_freq, 1.0, torch.float16).shape == (2, 0, 3, 8)


def module_of(rope: dict[str, Any]) -> Any:
    """Qwen3's module, of heads of 48."""
    config = Qwen3Config(
        head_dim=48, max_position_embeddings=8192, rope_parameters={"rope_theta": 1e6, **rope}
    )
    return Qwen3RotaryEmbedding(config)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        # It scales cosines and sines too.
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_the_definition_is_the_module_of_transformers(
    rope: dict[str, Any], dtype: torch.dtype
) -> None:
    module = module_of(rope)
    positions, _ = drawn(3, 5, 24, "cpu")
    cos, sin = module(torch.zeros(3, 5, 8, dtype=dtype), positions)
    both = rope_angles.reference(positions, module.inv_freq, module.attention_scaling, dtype)
    assert both.dtype == dtype
    assert torch.equal(both[0], cos)
    assert torch.equal(both[1], sin)


def test_the_draft_has_the_same_angles() -> None:
    module = module_of({"rope_type": "default"})
    config = DFlashConfig(head_dim=48, rope_parameters=module.config.rope_parameters)
    positions, _ = drawn(3, 5, 24, "cpu")
    states = torch.zeros(3, 5, 8, dtype=torch.bfloat16)
    cos, sin = DFlashRotaryEmbedding(config)(positions, states)
    wanted_cos, wanted_sin = module(states, positions)
    assert torch.equal(cos.squeeze(2), wanted_cos)
    assert torch.equal(sin.squeeze(2), wanted_sin)


@pytest.mark.parametrize("device", DEVICES)
def test_one_operation_with_a_true_schema(device: str) -> None:
    positions, inv_freq = drawn(2, 3, 4, device)
    torch.library.opcheck(rope_angles.op, (positions, inv_freq, 1.0, torch.float32))


def test_bad_input() -> None:
    positions, inv_freq = drawn(2, 3, 4, "cpu")
    check_raises(lambda: rope_angles(positions[0], inv_freq, 1.0, torch.float32), "[3]")
    check_raises(lambda: rope_angles(positions, inv_freq[None], 1.0, torch.float32), "[1, 4]")
    check_raises(lambda: rope_angles(positions, inv_freq, 1.0, torch.long), "torch.int64")
