"""The table3 recipe: rows of Table 3 for any base; each row trains, resumes and translates."""

import dataclasses
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from runs import ONE, tiny

from transformer_jax import Translator, load_model
from transformer_jax.config import (
    Config,
    DecodingConfig,
    MeshConfig,
    ModelConfig,
    TokenizerConfig,
)
from transformer_jax.config_io import flatten, load_config_file, recipe_path, to_json
from transformer_jax.data.batching import Batch
from transformer_jax.errors import UserError
from transformer_jax.sharding import make_mesh
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.progress import Progress
from transformer_jax.training.saver import Checkpoints
from transformer_jax.training.step import make_step_functions
from transformer_jax.training.workdir import Workdir

RECIPE = runpy.run_path(str(recipe_path("table3")))
ROWS, change = RECIPE["ROWS"], RECIPE["change"]
PAIRS = [("one two three", "eins zwei drei"), ("four five", "vier fünf"), ("six", "sechs")]


def changed(row: str, base: Config) -> dict[str, object]:
    """Settings that a row changes."""
    old, new = flatten(base), flatten(change(row, base))
    return {name: value for name, value in new.items() if value != old[name]}


def test_the_paper_is_the_paper_and_other_bases_are_in_proportion() -> None:
    paper = load_config_file("wmt14_base")
    for row, what in ROWS.items():
        assert changed(row, paper) == what.changes, row
    big = load_config_file("wmt14_big")
    assert change("big", paper).model == big.model
    small = tiny()
    model = dataclasses.replace(small.model, d_model=64, num_heads=4, num_layers=3, dropout=0.3)
    small = dataclasses.replace(small, model=model)
    values = [list(changed(row, small).values()) for row in ROWS]
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
    assert change("A-h1", dataclasses.replace(small, model=wide_heads)).model.d_v is None


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_the_argument_of_the_recipe(row: str) -> None:
    assert load_config_file(f"table3:{row}") == change(row, load_config_file("wmt14_base"))


def test_the_base_is_a_recipe_or_a_file(tmp_path: Path) -> None:
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
        (
            "table3",
            r"table3\.py': get_config\(\) needs an argument: table3:ARGUMENT\. Config of a",
        ),
        (
            "table3:",
            r"table3\.py', line \d+: Row '' is unknown; expected one of base, A-h1, .*, big",
        ),
        ("table3:C-N3", "Row 'C-N3' is unknown; expected one of base, "),
        ("table3:E,multi30", "Config 'multi30' is not a recipe; expected one of"),
        ("table3:E,none.py", "Config file 'none.py' does not exist"),
        ("demo:large", r"demo\.py': get_config\(\) takes no argument, but got 'large'"),
        ("tabel3:E", "'tabel3' is not a recipe; expected one of .*, table3, "),
    ],
)
def test_wrong_arguments_of_a_recipe_are_named(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config_file(name)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(PAIRS, TokenizerConfig(vocab_size=40))


def small(row: str, tokenizer: Tokenizer) -> Config:
    """A row on a model of one layer, or from two layers where the row changes their number."""
    base = tiny(average=1)
    layers = 2 if row.startswith("C-N") else 1
    model = dataclasses.replace(base.model, d_model=32, num_heads=8, num_layers=layers)
    config = change(row, dataclasses.replace(base, model=model))
    vocabulary = {"vocab_size": tokenizer.target.vocab_size}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **vocabulary),
        decoding=DecodingConfig(beam_size=2, max_extra_length=3, batch_size=2),
    )


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_parameters_of_its_sizes(row: str, tokenizer: Tokenizer) -> None:
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


# One for each setting that rows change, the far end where it goes both ways.
TRAINED = ["base", "A-h1", "A-h32", "B-dk16", "C-N2", "C-dmodel256", "C-dff1024"]
TRAINED += ["D-drop0.2", "D-ls0.0", "E", "big"]


@pytest.fixture(scope="module")
def translators() -> dict[ModelConfig, Translator]:
    """Compiled functions of earlier rows with the same model."""
    return {}


@pytest.mark.parametrize("row", TRAINED)
def test_a_row_trains_resumes_and_translates(
    row: str,
    tokenizer: Tokenizer,
    translators: dict[ModelConfig, Translator],
    tmp_path: Path,
) -> None:
    """One layer of 8 heads (another number where it is the row's) takes a step, is saved, restored
    to the same next step, and translates.
    """
    config = small(row, tokenizer)
    functions = make_step_functions(config, make_mesh(MeshConfig(), ONE))
    batch = Batch(*np.random.default_rng(0).integers(4, 40, (2, 8, 6), dtype=np.int32))
    (tmp_path / "config.json").write_text(to_json(config))
    tokenizer.save(tmp_path)
    checkpoints = Checkpoints(Workdir(tmp_path), config, tokenizer)

    rng = np.random.default_rng(1)  # another state than that of ``init``, which is compiled longer
    before = jax.tree.map(
        lambda x: jax.device_put(rng.uniform(0, 0.1, x.shape).astype(x.dtype), x.sharding),
        functions.abstract_state,
    )
    state, metrics = functions.train_step(before, batch)
    checkpoints.save(state, Progress())
    checkpoints.wait()
    restored = checkpoints.restore(1, functions.abstract_state)
    assert np.isfinite(metrics.sums.loss)
    state, metrics = functions.train_step(state, batch)
    resumed, again = functions.train_step(restored[0], batch)
    for one, other in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves((resumed, again))):
        np.testing.assert_array_equal(one, other)
    assert int(state.step) == 2 and not int(state.bad_steps)

    model = dataclasses.replace(config.model, dropout=0.0)  # a translator drops nothing
    if model in translators:
        translators[model].parameters = nnx.state(load_model(tmp_path)[1], nnx.Param)
    else:
        translators[model] = Translator.from_workdir(str(tmp_path))
    translations = translators[model].translate(["one six", "", "six one"])
    assert len(translations) == 3 and translations[1] == ""
