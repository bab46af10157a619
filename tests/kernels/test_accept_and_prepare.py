"""`accept_and_prepare`: the reference against the package's accept step, the kernel against the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels import accept_and_prepare
from dflash_kernels.accept_and_prepare import NUM_FIGURES
from helpers.kernel_checks import DEVICES, Guarded, assert_same_writes, check_raises

COLUMNS = 3
WRITTEN = ("block", "cursor", "remaining", "done", "ids", "draft_ids", "positions", "record")


class Step:
    """A verify's outcome and the state it meets; tokens are few, so that they match and end often.

    Args:
        seed (`int`): Of everything.
        batch, width, block_size, limit (`int`): Sizes.
        num_eos (`int`): Ids that end a text; 0 gives none.
        room (`int`): Columns of `ids` behind the limit; `generate`'s have `width`.
    """

    def __init__(
        self,
        seed: int,
        batch: int,
        width: int,
        block_size: int,
        limit: int,
        num_eos: int,
        room: int,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, generator=generator)

        self.tokens = draw(4, batch, width)
        proposals = torch.where(
            draw(4, batch, width - 1) > 0, self.tokens[:, :-1], draw(4, batch, width - 1)
        )
        num_new = draw(limit + 1, batch)
        self.eos = torch.arange(num_eos) if num_eos else None
        self.state = {
            "block": torch.cat([draw(4, batch, 1), proposals], dim=1),
            "cursor": num_new + COLUMNS,
            "remaining": limit - num_new,
            "done": draw(4, batch) == 0,
            "ids": draw(50, batch, COLUMNS + limit + room),
            "draft_ids": draw(50, batch, block_size),
            "positions": num_new[:, None] + 2 + torch.arange(block_size + 1),
            "record": draw(50, NUM_FIGURES + width, batch),
        }

    def arguments(
        self, state: dict[str, Tensor], device: str, accepted: Tensor | None = None
    ) -> tuple[Any, ...]:
        """What the operation takes, in its order."""
        given = [None if t is None else t.to(device) for t in (self.eos, accepted)]
        return (
            state["block"],
            self.tokens.to(device),
            *(state[name] for name in WRITTEN[1:]),
            *given,
        )

    def check(self, device: str, accepted: Tensor | None = None) -> None:
        """The kernel changes a guarded state as the reference does, and nothing around it."""
        ours, wanted = ({n: Guarded(t.to(device)) for n, t in self.state.items()} for _ in range(2))
        accept_and_prepare(
            *self.arguments({n: g.tensor for n, g in ours.items()}, device, accepted)
        )
        accept_and_prepare.reference(
            *self.arguments({n: g.tensor for n, g in wanted.items()}, device, accepted)
        )
        assert_same_writes(ours, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 2, 7, 16])
@pytest.mark.parametrize("num_eos", [0, 1, 3])
def test_kernel_equals_reference(num_eos: int, width: int, device: str) -> None:
    for seed, limit in enumerate((1, 5, 40)):
        Step(seed, 4, width, 8, limit, num_eos, width).check(device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_count_decided_elsewhere(device: str) -> None:
    step = Step(0, 5, 6, 6, 30, 1, 6)
    step.check(device, torch.tensor([0, 5, 3, 1, 2]))


@pytest.mark.parametrize("device", DEVICES)
def test_never_a_write_behind_the_buffer(device: str) -> None:
    """Buffers without the spare columns, and rows that may go on behind them."""
    step = Step(1, 5, 6, 6, 8, 0, 0)
    step.state["cursor"] += torch.tensor([0, 3, 6, 9, 20])
    step.state["remaining"] += 20
    step.check(device)


@pytest.mark.parametrize("device", DEVICES)
def test_counts_of_32_bits_and_views(device: str) -> None:
    step = Step(2, 3, 5, 4, 20, 2, 5)
    for name in ("cursor", "remaining"):
        step.state[name] = step.state[name].to(torch.int32)
    step.check(device)
    state = {n: t.to(device) for n, t in step.state.items()}
    wanted = {n: t.clone() for n, t in state.items()}
    accept_and_prepare.reference(*step.arguments(wanted, device))
    # Rows further apart than they are long.
    for name in ("block", "ids", "draft_ids", "positions"):
        state[name] = torch.cat([state[name], state[name]], dim=1)[:, : state[name].shape[1]]
    step.tokens = torch.cat([step.tokens, step.tokens], dim=1)[:, :5]
    accept_and_prepare(*step.arguments(state, device))
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("device", DEVICES)
def test_one_operation_with_a_true_schema(device: str) -> None:
    step = Step(0, 2, 3, 3, 9, 1, 3)
    arguments = step.arguments({n: t.to(device) for n, t in step.state.items()}, device)
    torch.library.opcheck(accept_and_prepare.op, arguments)


def test_public_function_and_bad_input() -> None:
    step = Step(3, 2, 3, 4, 9, 1, 3)
    names = {
        "block": "block_BW",
        "ids": "ids_BT",
        "draft_ids": "draft_ids_BK",
        "positions": "positions_BP",
    }
    names |= {"record": "record_FB"}
    wanted = {n: t.clone() for n, t in step.state.items()}
    accept_and_prepare.reference(*step.arguments(wanted, "cpu"))
    given: dict[str, Any] = {names.get(n, f"{n}_B"): t.clone() for n, t in step.state.items()}
    options = {"eos_ids_N": step.eos}
    for name, bad in (
        ("cursor_B", given["cursor_B"][:1]),
        ("done_B", given["done_B"].long()),
        ("ids_BT", given["ids_BT"].float()),
        ("block_BW", given["block_BW"][:, :2]),
        ("draft_ids_BK", given["draft_ids_BK"].mT.contiguous().mT),
        ("record_FB", given["record_FB"][:-1]),
        ("accepted_B", torch.zeros(3, dtype=torch.long)),
    ):
        check_raises(
            lambda bad={name: bad}: accept_and_prepare(
                **given | bad, tokens_BW=step.tokens, **options
            ),
            name,
        )
    for name, tensor in step.state.items():
        assert torch.equal(given[names.get(name, f"{name}_B")], tensor), (
            "a refused call changed something"
        )
    accept_and_prepare(**given, tokens_BW=step.tokens, **options)
    for name, tensor in wanted.items():
        assert torch.equal(given[names.get(name, f"{name}_B")], tensor), name
