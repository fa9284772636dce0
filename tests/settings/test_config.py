"""Configs: defaults, JSON, invalid values, config files, recipes."""

import contextlib
import dataclasses
import operator
import re
import traceback
import typing
from pathlib import Path

import pytest

from transformer_jax.data.sources import FILE_READERS
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.engine import SEARCH_METHODS
from transformer_jax.errors import UserError
from transformer_jax.evaluation import METRICS
from transformer_jax.model.layers import ACTIVATIONS
from transformer_jax.settings.config import (
    Config,
    DataConfig,
    DecodingConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.settings.config_files import flatten, from_json, load_config_file, to_json
from transformer_jax.training.optimizer import DECAYS, OPTIMIZERS

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted({*(ROOT / "configs").glob("*.py")} - {ROOT / "configs" / "table3.py"})


def test_defaults_are_the_papers_base_model() -> None:
    config = Config()
    model, optimizer = config.model, config.optimizer
    assert (model.num_layers, model.d_model, model.d_ff, model.num_heads) == (6, 512, 2048, 8)
    assert (model.head_width_k, model.head_width_v, model.dropout) == (64, 64, 0.1)
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon, optimizer.warmup_steps) == (
        0.9,
        0.98,
        1e-9,
        4000,
    )
    assert (config.training.label_smoothing, config.batch.tokens, config.training.steps) == (
        0.1,
        25_000,
        100_000,
    )
    assert (
        config.decoding.beam_size,
        config.decoding.length_penalty,
        config.decoding.max_extra_length,
    ) == (4, 0.6, 50)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_round_trip_through_json(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = Config(model=ModelConfig(d_model=64), training=TrainingConfig(freeze=("x",)))
    (tmp_path / "config.json").write_text(to_json(imported))
    folder = "transformer_jax.pretrained.loading.local_workdir"
    monkeypatch.setattr(folder, lambda _: tmp_path)  # recipes for fine-tuning download a model
    config = load_config_file(path)
    assert from_json(to_json(config)) == config
    if config.training.start_from:  # these recipes keep its architecture and frozen parameters
        assert config.model == imported.model and "x" in config.training.freeze
    documented = (ROOT / "docs" / "results.md").read_text()
    assert f"`{path.stem}`" in documented


def test_every_field_has_a_docstring_for_help() -> None:
    source = (ROOT / "transformer_jax" / "settings" / "config.py").read_text()
    for name in flatten(Config()):
        field = name.rsplit(".", 1)[-1]
        assert re.search(rf'^    {field}: .*\n    """', source, re.MULTILINE), (
            f"{name} has no docstring"
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ModelConfig(d_model=33, num_heads=3),
            "model.d_model is 33; expected an even number",
        ),
        (lambda: ModelConfig(d_model=34, num_heads=4), "a multiple of model.num_heads = 4"),
        (
            lambda: ModelConfig(dropout=1.0),
            r"model.dropout is 1.0; expected a value in \[0, 1\)",
        ),
        (
            lambda: ModelConfig(d_model=1_000_000),
            "model.d_model is 1000000; expected a number from 1 to 65,536",
        ),
        (
            lambda: TokenizerConfig(bpe_dropout_samples=1_000_000),
            "tokenizer.bpe_dropout_samples is 1000000; expected a positive number up to 512",
        ),
        (lambda: ModelConfig(vocab_size=9, source_vocab_size=8), "'target' or 'none'"),
        (
            lambda: PairsConfig("text", ("a", "b"), ("c",)),
            "target is .'c',.; expected 2 files, one for each in source",
        ),
        (lambda: PairsConfig("tfds"), "one dataset name for kind 'tfds'"),
        (
            lambda: PairsConfig("parquet", ("a",), ("b",)),
            "target is .'b',.; expected no files, because for kind 'parquet' source contains both",
        ),
        (
            lambda: PairsConfig("jsonl", ("a",), source_field="en"),
            "target_field is ''; expected the name of a field for kind 'jsonl'",
        ),
        (lambda: Config(seed=2**31), "seed is 2147483648; expected a number from 0 to"),
        (
            lambda: OptimizerConfig(epsilon=0.0),
            "optimizer.epsilon is 0.0; expected a positive number",
        ),
        (
            lambda: DecodingConfig(length_penalty=float("inf")),
            "length_penalty is inf; expected a finite number",
        ),
        (lambda: DecodingConfig(length_offset=1e39), "length_offset is 1e.39; expected a finite"),
        (lambda: DecodingConfig(seed=-1), "decoding.seed is -1; expected a number from 0 to"),
        (
            lambda: TrainingConfig(average=9, keep_checkpoints=5),
            "at most training.keep_checkpoints = 5",
        ),
        (
            lambda: TrainingConfig(steps=10**20),
            "training.steps is 100000000000000000000; expected a positive number below 2.31",
        ),
        (lambda: TrainingConfig(steps=10**6000), "training.steps is a number too long to print"),
        (
            lambda: TrainingConfig(select_by="bleu", bleu_sentences=0),
            "select_by is 'bleu'; expected 'loss', because training.bleu_sentences is 0",
        ),
        (lambda: TrainingConfig(r_drop=10**400), "training.r_drop is 1000.*00; expected a finite"),
        (
            lambda: TrainingConfig(r_drop=5.0, simcut=3.0),
            "training.simcut is 3.0; expected 0, because training.r_drop is above 0",
        ),
        (
            lambda: DecodingConfig(min_length=9, max_length=9),
            "decoding.max_length is 9; expected more than decoding.min_length = 9, or None",
        ),
        (lambda: MeshConfig(data=0), "mesh.data is 0; expected -1 or a positive number"),
        (
            lambda: ModelConfig(d_k=0),
            "model.d_k is 0; expected a positive number below 2.31 or None",
        ),
        (
            lambda: TokenizerConfig(user_defined_symbols=("<2de>", "<s>")),
            "user_defined_symbols is .'<2de>', '<s>'.; expected distinct words",
        ),
        (
            lambda: DecodingConfig(top_p=0.0),
            r"decoding.top_p is 0.0; expected a value in \(0, 1\]",
        ),
        (
            lambda: DecodingConfig(method="sample", patience=1.0),
            "decoding.patience is 1.0; expected None, because decoding.method is 'sample'",
        ),
        (lambda: ModelConfig(norm="rms"), "model.norm is 'rms'; expected one of 'post', 'pre'"),
        (lambda: ModelConfig(d_model="512"), "model.d_model is '512'; expected int"),
        (lambda: TrainingConfig(steps=1e5), "training.steps is 100000.0; expected int"),
        (
            lambda: PairsConfig("text", "train.en", "train.de"),
            "source is 'train.en'; expected a tuple with each item str",
        ),
        (
            lambda: Constraints(suppressed_ids=(-1,)),
            r"suppressed_ids is \(-1,\); expected a tuple with each item a number from 0 to 2\^31",
        ),
        (lambda: Config(seed=None), "seed is None; expected int"),
        (lambda: Config(model=DataConfig()), "expected ModelConfig"),
        (lambda: ModelConfig(dtype="int32"), "model.dtype is 'int32'; expected one of"),
    ],
)
def test_invalid_values(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]


# Settings that cost nothing by themselves: they limit, count from, or must fit other settings.
UNBOUNDED = """
    model.vocab_size model.d_k model.d_v model.max_positions
    tokenizer.vocab_size tokenizer.max_training_sentences
    data.train.limit data.dev.limit data.test.limit data.max_source_length data.max_target_length
    batch.tokens optimizer.peak_learning_rate optimizer.warmup_steps optimizer.accumulate_steps
    training.steps training.log_every training.eval_every training.bleu_sentences
    training.checkpoint_every training.keep_checkpoints training.patience training.max_bad_steps
    decoding.no_repeat_ngram decoding.patience decoding.top_k decoding.seed seed
    mesh.data mesh.fsdp mesh.tensor mesh.slices
"""


def test_every_setting_that_costs_time_or_memory_is_bounded() -> None:
    unbounded = set()
    for name, value in flatten(Config()).items():
        *path, field = name.split(".")
        section = operator.attrgetter(".".join(path))(Config()) if path else Config()
        if isinstance(value, bool | str | float | tuple):
            continue
        with contextlib.suppress(UserError):
            dataclasses.replace(section, **{field: 2**31 - 1})
            unbounded.add(name)
    assert unbounded == set(UNBOUNDED.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"model": {"d_modle": 5}}',
            r"Unknown config field model.d_modle; expected one of vocab_size, .* earlier version",
        ),
        ('{"xyz": 5}', "Unknown config field xyz; expected one of model, "),
        ('{"xyz": {}}', "Unknown config field xyz"),
        ('{"model": {"d_model": "512"}}', "model.d_model is '512'; expected int"),
        ('{"model": {"norm": "mid"}}', "model.norm is 'mid'; expected one of 'post', 'pre'"),
        ('{"model": {"remat": 1}}', "model.remat is 1; expected bool"),
        (
            '{"data": {"train": {"source": [1]}}}',
            r"source is \(1,\); expected a tuple with each item str",
        ),
        ('{"seed": {"x": 1}}', "seed is {'x': 1}; expected int"),
    ],
)
def test_invalid_values_in_json(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_json(text)


def test_messages_shorten_long_values() -> None:
    with pytest.raises(UserError) as error:
        ModelConfig(norm="x" * 10_000)  # type: ignore[arg-type]
    assert len(str(error.value)) < 250 and "'xxx" in str(error.value)


def test_json_of_earlier_versions_has_the_exact_stopping_rule() -> None:
    assert from_json('{"decoding": {"beam_size": 2}}').decoding == DecodingConfig(beam_size=2)
    assert DecodingConfig().patience is None


def test_json_accepts_integers_for_floats() -> None:
    assert from_json('{"model": {"dropout": 0}}').model.dropout == 0


def allowed_values(section: type, field: str) -> set[str]:
    """Return the names that a setting can have."""
    kinds = [typing.get_type_hints(section)[field]]
    names: set[str] = set()
    for kind in kinds:
        kinds += [part for part in typing.get_args(kind) if not isinstance(part, str)]
        names |= {part for part in typing.get_args(kind) if isinstance(part, str)}
    return names


@pytest.mark.parametrize(
    ("section", "field", "table", "elsewhere"),
    [
        (ModelConfig, "activation", ACTIVATIONS, set()),
        (OptimizerConfig, "name", OPTIMIZERS, set()),
        (OptimizerConfig, "decay", DECAYS, set()),
        (TrainingConfig, "select_by", METRICS, {"loss"}),
        (DecodingConfig, "method", SEARCH_METHODS, set()),
        (PairsConfig, "kind", FILE_READERS, {"text", "tfds", "none"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_name_that_a_setting_allows_is_in_the_table_that_implements_it(
    section: type, field: str, table: dict[str, object], elsewhere: set[str]
) -> None:
    assert allowed_values(section, field) == table.keys() | elsewhere


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"c\.py' has no get_config"),
        (
            "from transformer_jax import ModelConfig\n\n"
            "def get_config():\n    return ModelConfig(dropout=2)",
            "^model.dropout is 2; expected a value",
        ),
        ("def get_config(): return 3", r"c\.py' returned int; expected a transformer_jax Config"),
    ],
)
def test_invalid_recipes(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.py"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config_file(path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def get_config(:", SyntaxError),
        ("\nimport no_such_module", ModuleNotFoundError),
        (
            "from transformer_jax import ModelConfig\n"
            "def get_config():\n"
            "    return ModelConfig(d_modle=5)",
            TypeError,
        ),
    ],
)
def test_errors_of_recipes_are_pythons(tmp_path: Path, text: str, error: type[Exception]) -> None:
    path = tmp_path / "c.py"
    path.write_text(text)
    with pytest.raises(error) as raised:
        load_config_file(path)
    lines = "".join(traceback.format_exception(raised.value))
    assert f'c.py", line {len(text.splitlines())}' in lines


def test_a_config_file_is_plain_python(tmp_path: Path) -> None:
    """It does not inherit ``from __future__`` imports."""
    path = tmp_path / "c.py"
    path.write_text(
        "from transformer_jax import Config\n\n"
        "def get_config() -> Config:\n"
        "    assert get_config.__annotations__ == {'return': Config}\n"
        "    return Config(seed=3)"
    )
    assert load_config_file(path) == Config(seed=3)
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from transformer_jax import Config\n\n"
        "@dataclass\nclass Sizes:\n    seed: int = 4\n\n"
        "def get_config() -> Config:\n    return Config(seed=Sizes().seed)"
    )
    assert load_config_file(path) == Config(seed=4)


def test_recipes_are_found_by_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config_file("multi30k_cpu") == load_config_file(ROOT / "configs/multi30k_cpu.py")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("table3", r"table3\.py' does not fit --config: missing a required argument: 'argument'\."),
        ("demo:large", r"demo\.py' does not fit --config: too many positional arguments\. An arg"),
    ],
)
def test_an_argument_that_a_recipe_needs_or_does_not_take(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config_file(name)


def test_multi30k_many_has_a_model_for_all_or_some_directions() -> None:
    every, one = load_config_file("multi30k_many"), load_config_file("multi30k_many:en-fr")
    assert every.data.train.target_languages == every.tokenizer.new_languages == ("de", "fr", "en")
    assert one.data.train.language_pairs == [("en", "fr")]
    assert one.tokenizer.new_languages == ("fr", "en")
    assert (every.training.steps, one.training.steps) == (24_000, 8_000)
    with pytest.raises(UserError, match="'en' is not a direction; expected one such as en-de"):
        load_config_file("multi30k_many:en")


def test_multi30k_modern_has_the_data_and_updates_of_multi30k_cpu() -> None:
    both, one = load_config_file("multi30k_modern:both"), load_config_file("multi30k_modern")
    cpu = load_config_file("multi30k_cpu")
    assert one.data == cpu.data
    assert both.data.train.source[::-1] == both.data.train.target
    assert cpu.data.train.source + cpu.data.train.target == both.data.train.source
    assert both.training.steps + one.training.steps == cpu.training.steps
    with pytest.raises(UserError, match="multi30k_modern is 'en'; expected both or none"):
        load_config_file("multi30k_modern:en")


def test_paths_that_are_not_config_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.py' does not exist"):
        load_config_file(tmp_path / "none.py")
    with pytest.raises(UserError, match="config.json' does not exist; expected a Python file"):
        load_config_file(tmp_path)
    with pytest.raises(UserError, match=r"'multi30' is not a recipe; expected one of") as error:
        load_config_file("multi30")
    assert "multi30k_cpu, multi30k_many, multi30k_modern, pcfg_parsing, table3," in str(error.value)
    with pytest.raises(UserError, match="'/dev/null' is not a .py or .json file"):
        load_config_file("/dev/null")
    (tmp_path / "config.yaml").write_text("model: {}")
    with pytest.raises(UserError, match=r"config\.yaml' is not a \.py or \.json file"):
        load_config_file(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "The config is not valid"),
        (b"\xff", "The config is not valid"),
        (b'{"seed": ' + b"9" * 6000 + b"}", "The config is not valid"),
        (b"[" * 100_000, "The config is not valid"),
        (
            b'{"model": {"dropout": 2}}',
            "The config is not valid: model.dropout is 2; expected a value",
        ),
        (
            b'{"data": {"parts": 2}}',
            "The config is not valid: Unknown config field data.parts; expected one of ",
        ),
    ],
)
def test_errors_in_json_config_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"config\.json': {message}"):
        load_config_file(path)
