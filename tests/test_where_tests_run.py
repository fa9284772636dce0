"""Tests run on CPUs, or on the accelerator named by TEST_PLATFORM."""

import os

import jax


def test_tests_run_on_the_requested_platform() -> None:
    """Also in pytest's workers. Arrays and random bits are on it by default."""
    asked = os.environ.get("TEST_PLATFORM", "cpu")
    assert jax.default_backend() == {"cuda": "gpu", "rocm": "gpu"}.get(asked, asked)
    assert {x.platform for x in jax.random.key(0).devices()} == {jax.default_backend()}
    assert len(jax.devices("cpu")) == 8


def test_programs_started_by_tests_run_on_cpus() -> None:
    assert os.environ["JAX_PLATFORMS"] == "cpu"
