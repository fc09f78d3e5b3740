"""Every operator of torch that takes one tensor: right on pieces, or refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from mics.errors import MicsError
from mics.guard import Layout, Part, ShardOwner, ShardTensor
from tests.readings import read

SHAPE = (4, 3)


class _Ranks:
    """All-reduces among ranks that run one after the other: what each gives is kept for the next pass."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: list[list[Tensor]] = [[] for _ in range(size)]  # by rank, in order
        self.rank, self.position = 0, 0

    def begin(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def all_reduce(self, tensor: Tensor, label: str, *, maximum: bool = False) -> None:
        mine = self.given[self.rank]
        if self.position == len(mine):
            mine.append(tensor.clone())
        else:
            mine[self.position] = tensor.clone()
        others = [given[self.position] for given in self.given if len(given) > self.position]
        total = torch.stack(others)
        tensor.copy_(total.amax(0) if maximum else total.sum(0))
        self.position += 1


def _pieces(whole: Tensor, owner: ShardOwner, starts: tuple[int, ...]) -> list[ShardTensor]:
    flat = whole.reshape(-1)
    stops = (*starts[1:], flat.numel())
    pieces = []
    for start, stop in zip(starts, stops, strict=True):
        part = Part(name="w", shape=tuple(whole.shape), start=start, stop=stop, counts=True)
        local = flat[start:stop].clone().view(part.local_shape)
        pieces.append(ShardTensor.guard(local, Layout((part,)), ref(owner)))
    return pieces


def _operators() -> Iterator[Any]:
    for name in sorted(dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            operator = getattr(packet, overload)
            arguments = operator._schema.arguments
            required = [a for a in arguments if not a.has_default_value()]
            takes_one = bool(required) and str(required[0].type) == "Tensor"
            known = {"int": 1, "float": 0.5, "number": 2, "bool": False, "List[int]": [0]}
            rest = [known.get(str(a.type)) for a in required[1:]]
            if takes_one and None not in rest and not operator._schema.is_mutable:
                yield operator, rest


OPERATORS = list(_operators())
_NO_NUMBERS = {"empty_like", "new_empty", "data", "empty_quantized", "new_empty_strided", "empty_permuted"}
# Of torch's quantisation, there once that is imported: a rank without elements refuses, others answer.
_UNEVEN = {"_choose_qparams_per_tensor"}
_ABOUT_SHAPE = {
    "size",
    "sym_size",
    "stride",
    "sym_stride",
    "storage_offset",
    "sym_storage_offset",
    "dim",
    "len",
}


def _answer(operator: Any, rest: list[Any], value: Any) -> tuple[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read(lambda tensor: _whole(operator(tensor, *rest)), value)


def _whole(result: Any) -> Any:
    if isinstance(result, ShardTensor):
        return result.full_tensor()
    if isinstance(result, list | tuple):
        return [_whole(each) for each in result]
    return result


@pytest.mark.parametrize(
    "starts", [(0, 5, 9), *(pytest.param(s, marks=pytest.mark.full) for s in [(0, 11, 12), (0, 1, 1)])]
)
def test_operators_on_pieces_answer_for_the_whole(starts: tuple[int, ...]) -> None:
    """Three ranks, with even pieces, with one of a single element and one of none, and nearly all on one."""
    torch.manual_seed(0)
    whole = torch.randn(SHAPE)
    wrong = []
    for operator, rest in OPERATORS:
        name = operator._overloadpacket.__name__
        if name in _NO_NUMBERS | _ABOUT_SHAPE | _UNEVEN:
            continue
        expected = _answer(operator, rest, whole.clone())
        ranks = _Ranks(len(starts))
        owner = ShardOwner(members=ranks, device=torch.device("cpu"))  # type: ignore[arg-type]
        pieces = _pieces(whole, owner, starts)
        for _ in range(4):  # until every rank has heard what the others give
            found = []
            for rank, piece in enumerate(pieces):
                ranks.begin(rank)
                found.append(_answer(operator, rest, piece))
            if not any(ranks.given):
                break  # nobody asks the others
        kinds = {kind for kind, _ in found}
        if len(kinds) > 1:
            wrong.append(f"{operator}: ranks differ: {found}")
        elif kinds == {"answer"} and not all(_same(value, expected[1]) for _, value in found):
            wrong.append(f"{operator}: {found}, on the whole tensor {expected}")
        elif kinds == {"torch"} and expected[0] != "torch":
            wrong.append(f"{operator}: {found}")
    assert not wrong, "\n".join(str(each)[:300] for each in wrong)


def _same(found: Any, expected: Any) -> bool:
    found, expected = (value if isinstance(value, list) else [value] for value in (found, expected))
    return len(found) == len(expected) and all(
        a == b
        or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5))
        or (a != a and b != b)
        for a, b in zip(found, expected, strict=True)
    )


def test_many_operators_are_tried_and_many_answered() -> None:
    """The lists above are not empty, and the guard is not one that refuses everything."""
    assert len(OPERATORS) > 300
    piece = torch.randn(SHAPE)
    ranks = _Ranks(1)
    owner = ShardOwner(members=ranks, device=torch.device("cpu"))  # type: ignore[arg-type]
    (guarded,) = _pieces(piece, owner, (0,))
    answered = sum(_answer(operator, rest, guarded)[0] == "answer" for operator, rest in OPERATORS)
    assert answered > 100
    with pytest.raises(MicsError, match="full_tensor"):
        guarded.argmax()
