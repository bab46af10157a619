"""The processes that hold one target together (tensor parallelism), as Transformers keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_of(model: PreTrainedModel) -> DeviceMesh | None:
    """Returns the mesh of the processes that hold a model together, `None` where this process holds the whole one."""
    # The attribute in which Transformers keeps the mesh of devices that a model is sharded over.
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None:
        return None
    if "tp" in (mesh.mesh_dim_names or ()):
        mesh = mesh["tp"]
    if mesh.size() == 1:
        return None
    return mesh
