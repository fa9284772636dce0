"""The rows of Table 3 for any base, and that each one trains, resumes and translates."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import ONE, tiny

from transformer_jax import Translator
from transformer_jax.config import Config, DecodingConfig, MeshConfig, TokenizerConfig
from transformer_jax.config_io import flatten, load_config_file, recipe_path, to_json
from transformer_jax.data.batching import Batch
from transformer_jax.sharding import make_mesh
from transformer_jax.table3.runs import load_table
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.progress import Progress
from transformer_jax.training.saver import Checkpoints
from transformer_jax.training.step import init_state, make_step_functions

ROOT = Path(__file__).resolve().parents[2]
TABLE = load_table(recipe_path("table3"))
PAIRS = [("one two three", "eins zwei drei"), ("four five", "vier fünf"), ("six", "sechs")]


def changed(row: str, base: Config) -> dict[str, object]:
    """The settings that a row changes."""
    old, new = flatten(base), flatten(TABLE.change(row, base))
    return {name: value for name, value in new.items() if value != old[name]}


def test_the_paper_is_the_paper_and_other_bases_are_in_proportion() -> None:
    paper = load_config_file(ROOT / "configs" / "wmt14_base.py")
    for row, what in TABLE.rows.items():
        assert changed(row, paper) == what.changes, row
    big = load_config_file(ROOT / "configs" / "wmt14_big.py")
    assert TABLE.change("big", paper).model == big.model
    small = tiny()
    model = dataclasses.replace(small.model, d_model=64, num_heads=4, num_layers=3, dropout=0.3)
    small = dataclasses.replace(small, model=model)
    values = [list(changed(row, small).values()) for row in TABLE.rows]
    assert values == [
        *([], [1], [2], [8], [16]),  # heads: an eighth of 4 would be none
        *([4], [8]),  # d_k
        *([1], [2], [4]),  # layers
        *([32], [128], [16], [64]),  # d_model, d_ff
        *([0.0], [0.4], [0.0], [0.2]),
        ["learned"],
        [128, 64, 8, 0.5, 90],
    ]
    wide_heads = dataclasses.replace(model, d_k=32, d_v=8)
    assert TABLE.change("A-h1", dataclasses.replace(small, model=wide_heads)).model.d_v is None


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(PAIRS, TokenizerConfig(vocab_size=40))


@pytest.mark.parametrize("row", TABLE.rows)
def test_a_row_trains_resumes_and_translates(
    row: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """One layer of 8 heads (from two layers to 1, 1 and 3 where these are the row's) takes a step,
    is saved, restored to the same next step, and translates.
    """
    small, layers = tiny(average=1), 2 if row.startswith("C-N") else 1
    vocabulary = {"vocab_size": tokenizer.target_vocab_size}
    model = dataclasses.replace(small.model, d_model=32, num_heads=8, num_layers=layers)
    config = TABLE.change(row, dataclasses.replace(small, model=model))
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **vocabulary),
        decoding=DecodingConfig(beam_size=2, max_extra_length=3, batch_size=2),
    )
    functions = make_step_functions(config, make_mesh(MeshConfig(), ONE))
    batch = Batch(*np.random.default_rng(0).integers(4, 40, (2, 8, 6), dtype=np.int32))
    (tmp_path / "config.json").write_text(to_json(config))
    tokenizer.save(tmp_path)
    checkpoints = Checkpoints(tmp_path, config, tokenizer)

    # Not compiled, which takes longer; as copies, because the step gives up what it is given.
    before = jax.tree.map(
        lambda x, place: jax.device_put(np.array(x), place.sharding),
        init_state(config, jax.numpy.uint32(0)),
        functions.abstract_state,
    )
    state, metrics = functions.train_step(before, batch)
    checkpoints.save(state, Progress())
    checkpoints.wait()
    restored = checkpoints.restore_latest(functions.abstract_state)
    assert restored is not None and np.isfinite(metrics.sums.loss)
    state, metrics = functions.train_step(state, batch)
    resumed, again = functions.train_step(restored[0], batch)
    for one, other in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves((resumed, again))):
        np.testing.assert_array_equal(one, other)
    assert int(state.step) == 2 and not int(state.bad_steps)

    translations = Translator.from_workdir(str(tmp_path)).translate(["one six", "", "two"])
    assert len(translations) == 3 and translations[1] == ""
