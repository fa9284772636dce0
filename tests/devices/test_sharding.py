"""Device meshes: slices, topology of TPUs, and their errors."""

import itertools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.mesh_utils import create_hybrid_device_mesh

from transformer_jax.devices.sharding import check_rows, make_mesh
from transformer_jax.errors import UserError
from transformer_jax.settings.config import MeshConfig


class Chip(SimpleNamespace):
    """A fake TPU device."""

    __hash__ = object.__hash__


def tpus(slices: int, width: int, height: int) -> list[Any]:
    """Chips of slices with four chips per host, in host order, like ``jax.devices()``."""
    places = itertools.product(range(slices), range(height), range(width))
    return [
        Chip(
            platform="tpu",
            device_kind="TPU v5 lite",
            slice_index=index,
            coords=(x, y, 0),
            core_on_chip=0,
            id=number,
            process_index=number // 4,
        )
        for number, (index, y, x) in enumerate(places)
    ]


@pytest.mark.parametrize("shape", [(32, 1, 1), (8, 4, 1), (2, 16, 1), (8, 2, 2), (2, 4, 4)])
def test_slices_divide_data_and_mesh_neighbors_are_close(shape: tuple[int, int, int]) -> None:
    chips = tpus(2, 4, 4)
    mesh = make_mesh(MeshConfig(-1, *shape[1:]), chips).devices
    assert mesh.shape == shape
    expected = create_hybrid_device_mesh(
        (shape[0] // 2, *shape[1:]), (2, 1, 1), chips, allow_split_physical_axes=True
    )
    assert (mesh == expected).all()
    for axis in (1, 2):  # each group of fsdp and of tensor is in one slice
        slices = np.vectorize(lambda chip: chip.slice_index)(mesh)
        assert (slices.max(axis) == slices.min(axis)).all()


def test_rows_of_a_host_need_not_be_contiguous() -> None:
    """The ring through a slice of 4 x 4 chips leaves a host and returns to it."""
    hosts = [chip.process_index for chip in make_mesh(MeshConfig(), tpus(1, 4, 4)).devices.flat]
    assert hosts != sorted(hosts)


@pytest.mark.devices(8)
def test_slices_of_other_devices_are_contiguous_groups() -> None:
    mesh = make_mesh(MeshConfig(fsdp=2, slices=4))
    assert mesh.devices.reshape(-1).tolist() == jax.devices()
    assert mesh.shape == {"data": 4, "fsdp": 2, "tensor": 1}


@pytest.mark.parametrize(
    ("config", "chips", "message"),
    [
        (MeshConfig(fsdp=32), (2, 4, 4), "mesh.data is 1; expected a multiple of 2, the number of"),
        (MeshConfig(slices=3), (1, 4, 4), "mesh.slices is 3; expected a divisor of 16, the number"),
        (MeshConfig(), (1, 5, 1), "is 5 x 1 x 1 in a slice of 5 devices; expected axes"),
    ],
    ids=str,
)
def test_invalid_meshes(config: MeshConfig, chips: tuple[int, int, int], message: str) -> None:
    devices = tpus(*chips)
    if chips == (1, 5, 1):  # with a hole
        devices.pop(2)
        devices.append(tpus(1, 6, 1)[5])
    with pytest.raises(UserError, match=message):
        make_mesh(config, devices)


@pytest.mark.devices(8)
@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)])
@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_rows_divide_over_devices_and_microbatches(
    shape: tuple[int, int, int], accumulate_steps: int
) -> None:
    """A row is split over no axis but data and fsdp."""
    mesh = make_mesh(MeshConfig(*shape))
    product = shape[0] * shape[1] * accumulate_steps
    for rows in range(1, 50):
        if rows % product == 0:
            check_rows(mesh, rows, accumulate_steps)
        else:
            with pytest.raises(UserError, match=rf"_multiple is {rows}; .* = {product}, so that"):
                check_rows(mesh, rows, accumulate_steps)
