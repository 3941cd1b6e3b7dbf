"""The residual stream: whatever a product leaves to be added arrives, once, in the next norm."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine.model.layers.norm import RmsNorm
from engine.model.stream import Stream

RESIDUAL = torch.arange(12.0).view(3, 4)
PRODUCT = torch.arange(12.0).view(3, 4).flip(0) + 0.5
NORM = RmsNorm(torch.tensor([1.0, 2.0, 3.0, 4.0]), 1e-6)


@dataclass(frozen=True, slots=True)
class Product:
    """A linear whose product with anything is `PRODUCT`, delivered in one of the three ways that `Linear.onto` may."""

    way: str

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return PRODUCT if out is None else out.copy_(PRODUCT)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack((PRODUCT - 7, torch.full_like(PRODUCT, 7.0)))

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        if self.way == "in place":
            residual += PRODUCT
            return None
        return PRODUCT if self.way == "whole" else self.parts(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return PRODUCT


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(dim=-1, keepdim=True).add(NORM.eps).sqrt() * NORM.weight


@pytest.fixture(params=["in place", "whole", "partial sums"])
def product(request: pytest.FixtureRequest) -> Product:
    return Product(request.param)


def stream() -> Stream:
    return Stream(RESIDUAL.clone())


def test_a_stream_without_products_is_its_residual() -> None:
    torch.testing.assert_close(stream().normed(NORM), normed(RESIDUAL))


def test_a_product_is_added_before_the_norm_and_once(product: Product) -> None:
    going = stream()
    going.plus(product, RESIDUAL)
    for _ in range(2):
        torch.testing.assert_close(going.normed(NORM), normed(RESIDUAL + PRODUCT))


def test_two_products_in_a_row_are_both_added(product: Product) -> None:
    going = stream()
    going.plus(product, RESIDUAL)
    going.plus(product, RESIDUAL)
    torch.testing.assert_close(going.normed(NORM), normed(RESIDUAL + 2 * PRODUCT))


def test_rows_go_on_with_what_is_to_be_added_to_them(product: Product) -> None:
    going = stream()
    going.plus(product, RESIDUAL)
    going.only(torch.tensor([2, 0], dtype=torch.int32))
    torch.testing.assert_close(going.normed(NORM), normed(RESIDUAL + PRODUCT)[[2, 0]])
    assert not going.is_empty


def test_a_stream_of_no_rows_says_so() -> None:
    going = stream()
    assert not going.is_empty
    going.only(None)
    assert going.is_empty
