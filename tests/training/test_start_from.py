"""Fine-tuning: a run starts from the model of another run."""

from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from runs import ONE, changed, no_evaluation, tiny

from transformer_jax.errors import UserError
from transformer_jax.pretrained.loading import load_model
from transformer_jax.settings.config import Config, PairsConfig, TokenizerConfig
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.loop import train
from transformer_jax.training.prepare import prepare


@pytest.fixture(scope="module")
def general(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on number names."""
    workdir = tmp_path_factory.mktemp("general") / "run"
    train(no_evaluation(tiny(steps=10)), workdir, devices=ONE)
    return workdir


def _own_text(folder: Path, start_from: Path, **training: Any) -> Config:
    """A config for other text, with letters that the general run's tokenizer may not know."""
    (folder / "source").write_text("eins zwei\nzwei drei\nÖl\n" * 20, encoding="utf-8")
    (folder / "target").write_text("one two\ntwo three\noil\n" * 20, encoding="utf-8")
    config = no_evaluation(
        tiny(steps=4, checkpoint_every=2, start_from=str(start_from), **training)
    )
    pairs = PairsConfig("text", ("source",), ("target",))
    return changed(config, data={"root": str(folder), "train": pairs})


def _parameters(path: Path) -> Any:
    return nnx.to_pure_dict(nnx.state(load_model(path)[1], nnx.Param))


def test_the_first_step_has_the_other_runs_parameters_and_tokenizer(
    general: Path, tmp_path: Path
) -> None:
    config = _own_text(tmp_path, general)
    config = changed(config, optimizer={"ema_decay": 0.9})
    with prepare(config, tmp_path / "run", devices=ONE) as run:
        state = run.state
    expected = _parameters(general)  # the average of the last two checkpoints, as in decode.py
    chex.assert_trees_all_equal(state.parameters, expected)
    chex.assert_trees_all_equal(state.ema, expected)
    assert int(state.step) == 0 and not any(
        np.any(leaf) for leaf in jax.tree.leaves(state.optimizer)
    )
    assert Tokenizer.load(tmp_path / "run").fingerprint == Tokenizer.load(general).fingerprint


def test_new_symbols_extend_the_vocabulary(general: Path, tmp_path: Path) -> None:
    """Old tokens keep their embeddings, and a new token starts with the mean of all of them."""
    config = _own_text(tmp_path, general)
    (tmp_path / "source").write_text("<2en> eins zwei\n" * 60)
    config = changed(
        config, tokenizer=TokenizerConfig(vocab_size=150, user_defined_symbols=("<2en>",))
    )
    with prepare(config, tmp_path / "run", devices=ONE) as run:
        state = run.state
    old, new = (
        _parameters(general)["target_embedding"]["matrix"],
        state.parameters["target_embedding"]["matrix"],
    )
    np.testing.assert_array_equal(new[:-1], old)
    np.testing.assert_allclose(
        new[-1], np.asarray(old).mean(axis=0, dtype=np.float64), rtol=1e-5, atol=1e-7
    )
    assert train(config, tmp_path / "run", devices=ONE)["steps"] == 4
    tokenizer = Tokenizer.load(tmp_path / "run")
    assert (
        tokenizer.source.tokens([len(old)]) == ["<2en>"]
        and len(old) in tokenizer.source.encode(["<2en> eins"])[0]
    )
    assert load_model(tmp_path / "run")[0].model.vocab_size == len(old) + 1


def test_new_pieces_start_from_the_mean_of_their_parts(general: Path, tmp_path: Path) -> None:
    """They are learned from the training text; a run on top does not add them again."""
    config = _own_text(tmp_path, general)
    config = changed(config, tokenizer={"new_pieces": "5"})
    with prepare(config, tmp_path / "run", devices=ONE) as run:
        new_D = np.asarray(run.state.parameters["target_embedding"]["matrix"])
        tokenizer = run.tokenizer
    old = Tokenizer.load(general)
    old_D = np.asarray(_parameters(general)["target_embedding"]["matrix"])
    assert [*tokenizer.new_rows] == [*range(len(old_D), len(old_D) + 5)] and len(new_D) == len(
        old_D
    ) + 5
    np.testing.assert_array_equal(new_D[: len(old_D)], old_D)
    for number, start in tokenizer.new_rows.items():
        assert start == old.source.part_ids(tokenizer.source.tokens([number])[0])
        np.testing.assert_allclose(new_D[number], old_D[start].mean(0), rtol=1e-6)
    [before], [after] = old.source.encode(["zwei drei"]), tokenizer.source.encode(["zwei drei"])
    assert len(after) < len(before)
    train(config, tmp_path / "run", devices=ONE)
    on_top = changed(config, training={"start_from": str(tmp_path / "run")})
    with prepare(on_top, tmp_path / "on top", devices=ONE) as run:
        assert run.tokenizer.fingerprint == tokenizer.fingerprint
    for setting, message in (
        ("500", "fewer than .* different merges"),
        (str(tmp_path / "missing"), "missing', which cannot be read .*; expected a number, or"),
    ):
        with (
            pytest.raises(UserError, match=message),
            prepare(changed(config, tokenizer={"new_pieces": setting}), tmp_path / "bad"),
        ):
            pass
    from_scratch = changed(config, training={"start_from": ""})
    with (
        pytest.raises(UserError, match="tokenizer.new_pieces is '5'; expected '', unless training"),
        prepare(from_scratch, tmp_path / "scratch"),
    ):
        pass


def test_start_from_a_single_checkpoint(general: Path, tmp_path: Path) -> None:
    config = _own_text(tmp_path, general / "checkpoints" / "00000005")
    with prepare(config, tmp_path / "run", devices=ONE) as run:
        state = run.state
    chex.assert_trees_all_equal(state.parameters, _parameters(general / "checkpoints" / "00000005"))


def test_resuming_does_not_need_the_other_run(general: Path, tmp_path: Path) -> None:
    other = tmp_path / "general"
    general.rename(other)
    config = _own_text(tmp_path, other)
    assert train(config, tmp_path / "run", devices=ONE)["steps"] == 4
    other.rename(general)
    longer = changed(config, training={"steps": 6})
    assert train(longer, tmp_path / "run", devices=ONE)["steps"] == 6
    with pytest.raises(UserError, match="start_from"):  # the run would have started differently
        train(_own_text(tmp_path, Path("")), tmp_path / "run", devices=ONE)


def test_another_model_shape_is_an_error_before_the_text_is_read(
    general: Path, tmp_path: Path
) -> None:
    config = _own_text(tmp_path, general)
    wrong = changed(
        config,
        model={"d_model": 32, "dropout": 0.3},
        tokenizer={"vocab_size": 200, "bpe_dropout": 0.1},
    )
    with pytest.raises(
        UserError,
        match=r"model or tokenizer settings differ from this run's. Use --config \S+/run\. .*"
        r"\n  model.d_model: 16 in .*, 32 now\n  tokenizer.vocab_size: 150 in .*, 200 now$",
    ):
        train(wrong, tmp_path / "run", devices=ONE)
    assert not (tmp_path / "run" / "corpus").exists()
    free = changed(config, model={"dropout": 0.3})
    with prepare(free, tmp_path / "run", devices=ONE):  # the folder is still usable
        pass
