"""The table3 recipe: rows of Table 3 for any base; each row trains, resumes and translates."""

import dataclasses
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import ONE, changed, tiny

from transformer_jax import Translator
from transformer_jax.data.batching import Batch
from transformer_jax.devices.sharding import make_mesh
from transformer_jax.errors import UserError
from transformer_jax.runs.manifest import Manifest
from transformer_jax.runs.progress import Progress
from transformer_jax.runs.workdir import Workdir
from transformer_jax.settings.config import Config, DecodingConfig, MeshConfig, TokenizerConfig
from transformer_jax.settings.config_files import flatten, load_config_file, recipe_path, to_json
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.step import make_step_functions

RECIPE = runpy.run_path(str(recipe_path("table3")))
ROWS, change = RECIPE["ROWS"], RECIPE["change"]
PAIRS = [("one two three", "eins zwei drei"), ("four five", "vier fünf"), ("six", "sechs")]


def changes(row: str, base: Config) -> dict[str, object]:
    """Settings of a base config that a row changes, and their new values."""
    old, new = flatten(base), flatten(change(row, base))
    return {name: value for name, value in new.items() if value != old[name]}


def test_rows_have_the_papers_values_or_scale_with_the_base() -> None:
    paper = load_config_file("wmt14_base")
    for row, what in ROWS.items():
        assert changes(row, paper) == what.changes, row
    big = load_config_file("wmt14_big")
    assert change("big", paper).model == big.model
    small = tiny()
    model = dataclasses.replace(small.model, d_model=64, num_heads=4, num_layers=3, dropout=0.3)
    small = dataclasses.replace(small, model=model)
    values = [list(changes(row, small).values()) for row in ROWS]
    assert values == [
        *([], [1], [2], [8], [16]),  # heads: at least one, although 4 / 8 < 1
        *([4], [8]),  # d_k
        *([1], [2], [4]),  # layers
        *([32], [128], [16], [64]),  # d_model, d_ff
        *([0.0], [0.4], [0.0], [0.2]),
        ["learned"],
        [128, 64, 8, 0.5, 90],
    ]
    wide_heads = dataclasses.replace(model, d_k=32, d_v=8)
    assert change("A-h1", dataclasses.replace(small, model=wide_heads)).model.d_v is None


@pytest.mark.parametrize("row", ROWS)
def test_the_recipe_takes_a_row(row: str) -> None:
    assert load_config_file(f"table3:{row}") == change(row, load_config_file("wmt14_base"))


def test_the_recipe_takes_a_base(tmp_path: Path) -> None:
    base = tmp_path / "runs:1"
    base.mkdir()
    (base / "config.json").write_text(to_json(tiny()))
    (base / "recipe.py").write_text(
        "from pathlib import Path\nfrom transformer_jax import load_config_file\n\n\n"
        "def get_config():\n    return load_config_file(Path(__file__).parent / 'config.json')\n"
    )
    small = change("C-N2", load_config_file("multi30k"))
    assert load_config_file("table3:C-N2,multi30k") == small
    for file in (base / "config.json", base / "recipe.py"):
        assert load_config_file(f"table3:E,{file}") == change("E", tiny())
        assert load_config_file(f"{recipe_path('table3')}:E,{file}") == change("E", tiny())
    assert load_config_file("table3:E,table3:C-N2") == change(
        "E", change("C-N2", load_config_file("wmt14_base"))
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("table3:", "Row '' is unknown; expected one of base, A-h1, .*, big"),
        ("table3:C-N3", "Row 'C-N3' is unknown; expected one of base, "),
        ("table3:E,multi30", "Config 'multi30' is not a recipe; expected one of"),
        ("table3:E,none.py", "Config file 'none.py' does not exist"),
        ("tabel3:E", "'tabel3' is not a recipe; expected one of .*, table3, "),
    ],
)
def test_invalid_recipe_arguments(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config_file(name)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(PAIRS, TokenizerConfig(vocab_size=40))


def small(row: str, tokenizer: Tokenizer) -> Config:
    """A row based on a small model with one layer, or two if the row changes their number."""
    base = tiny(average=1)
    layers = 2 if row.startswith("C-N") else 1
    model = dataclasses.replace(base.model, d_model=32, num_heads=8, num_layers=layers)
    config = change(row, dataclasses.replace(base, model=model))
    vocabulary = {"vocab_size": tokenizer.target.vocab_size}
    return changed(
        config,
        model={**vocabulary},
        decoding=DecodingConfig(beam_size=2, max_extra_length=3, batch_size=2),
    )


@pytest.mark.parametrize("row", ROWS)
def test_parameter_shapes_of_a_row(row: str, tokenizer: Tokenizer) -> None:
    config = small(row, tokenizer)
    functions = make_step_functions(config, make_mesh(MeshConfig(), ONE))
    parameters, model = functions.abstract_state.parameters, config.model
    layers = parameters["encoder"]["layers"]
    assert len(layers) == len(parameters["decoder"]["layers"]) == model.num_layers
    shapes = [
        layers[0]["self_attention"]["query"]["kernel"].shape,
        layers[0]["feed_forward"]["inner"]["kernel"].shape,
    ]
    heads = model.num_heads, model.head_width_k
    assert shapes == [(model.d_model, *heads), (model.d_model, model.d_ff)]


# Rows of other code paths than the tiny model of other tests: one head, keys narrower than
# d_model / heads, no label smoothing, learned positions, and all sizes at once.
TRAINED = [
    pytest.param(row, marks=[] if row == "B-dk16" else pytest.mark.exhaustive)
    for row in ("A-h1", "B-dk16", "D-ls0.0", "E", "big")
]


@pytest.mark.parametrize("row", TRAINED)
def test_a_row_trains_resumes_and_translates(
    row: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = small(row, tokenizer)
    functions = make_step_functions(config, make_mesh(MeshConfig(), ONE))
    batch = Batch(*np.random.default_rng(0).integers(4, 40, (2, 8, 6), dtype=np.int32))
    (tmp_path / "config.json").write_text(to_json(config))
    tokenizer.save(tmp_path)
    workdir = Workdir(tmp_path)
    workdir.config = config
    workdir.tokenizer = tokenizer
    checkpoints = workdir.checkpoints

    rng = np.random.default_rng(1)  # init would take longer, because it must be compiled
    before = jax.tree.map(
        lambda x: jax.device_put(rng.uniform(0, 0.1, x.shape).astype(x.dtype), x.sharding),
        functions.abstract_state,
    )
    state, metrics = functions.train_step(before, batch)
    checkpoints.save(state, Progress())
    checkpoints.wait()
    restored = checkpoints.restore(Manifest(checkpoints.path(1)), functions.abstract_state)
    assert np.isfinite(metrics.sums.loss)
    state, metrics = functions.train_step(state, batch)
    resumed, again = functions.train_step(restored[0], batch)
    for one, other in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves((resumed, again))):
        np.testing.assert_array_equal(one, other)
    assert int(state.step) == 2 and not int(state.bad_steps)

    translations = Translator.from_workdir(str(tmp_path)).translate(["one six", "", "six one"])
    assert len(translations) == 3 and translations[1] == ""
