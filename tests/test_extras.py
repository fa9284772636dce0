"""Optional packages: an error in one line names the extra that installs them."""

import sys

import pytest

from transformer_jax import UserError, needs_extra


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(UserError) as caught, needs_extra("demo"):
        import num2words  # noqa: F401
    assert str(caught.value) == (
        "num2words is not installed. Install it with: pip install 'transformer-jax[demo]'."
    )


def test_mistakes_in_own_modules_stay_import_errors() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing"), needs_extra("serve"):
        import transformer_jax.nothing  # noqa: F401
