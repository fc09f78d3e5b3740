"""Settings: defaults, YAML, flags over YAML, and errors that name the setting."""

from dataclasses import fields
from pathlib import Path

import pytest

from mics.errors import SettingsError
from mics.train.config import ModelSettings, OptimizerSettings, TrainConfig
from mics.train.settings_file import parse_train_config


def _yaml(tmp_path: Path, text: str) -> str:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    return str(file)


def test_defaults_need_no_arguments() -> None:
    """`mics train` alone is a complete run."""
    assert parse_train_config([]) == TrainConfig()


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    """Three sources, one order; 3e-4 is a number although YAML reads it as text."""
    file = _yaml(tmp_path, "steps: 7\nbatch-size: 3\noptimizer: {learning_rate: 3e-4, beta2: 0.9}\n")
    config = parse_train_config(["--config", file, "--steps", "9", "--optimizer.beta2", "0.8"])
    assert (config.steps, config.batch_size, config.micro_steps) == (9, 3, None)
    assert (config.optimizer.learning_rate, config.optimizer.beta2) == (3e-4, 0.8)


def test_null_in_the_file_means_unset(tmp_path: Path) -> None:
    """A setting that may be unset can be unset in a file."""
    config = parse_train_config([f"--config={_yaml(tmp_path, 'sharding: {partition_size: null}')}"])
    assert config.sharding.partition_size is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "stepz: 3",
            r"stepz: unknown setting \(did you mean steps\?\); expected one of name, output",
        ),
        ("model: {nme: nano}", r"model\.nme: unknown setting \(did you mean model\.name\?\)"),
        ("model: {name: huge}", r"--model 'huge': expected a named size.*known: nano, gpt-tiny"),
        ("steps: many", r"steps: expected a whole number, found 'many'"),
        ("steps: true", r"steps: expected a whole number, found True"),
        ("steps: 1.5", r"steps: expected a whole number, found 1.5"),
        ("steps: 0", r"steps: expected at least 1, found 0"),
        ("optimizer: {beta1: high}", r"optimizer\.beta1: expected a number, found 'high'"),
        ("report: {save_weights: 1}", r"report\.save_weights: expected true or false, found 1"),
        ("model: {hidden_size: 30}", r"model\.hidden_size: expected a multiple of"),
        ("model: {vocab_size: 100}", r"model\.vocab_size: expected at least 256"),
        ("data: {text: nowhere.txt}", r"data\.text: expected a file that exists, found 'nowhere.txt'"),
        ("launch: 3", r"launch: expected names with values, found 3"),
        ("config: other.yaml", r"config: unknown setting"),
        ("global_batch_tokens: lots", r"global_batch_tokens: expected a whole number above 0, such as 1M"),
        ("global_batch_tokens: true", r"global_batch_tokens: expected"),
        (
            "{global_batch: 8, global_batch_tokens: 1M}",
            r"expected one of them, found both .8 sequences and 1 M",
        ),
        ("{global_batch: 8, micro_steps: 2}", r"micro_steps, global_batch: expected one of them, found both"),
        ("steps: 3\nname: a\nsteps: 4", r"steps \(line 3\): expected once, found twice; keep one of them"),
        ("- a list", r"the file: expected names with values"),
        ("a: [", r"not valid YAML"),
        ("a: " + "[" * 3000, r"not valid YAML: maximum recursion depth"),
        ("steps: " + "9" * 5000, r"not valid YAML: Exceeds the limit"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_setting(tmp_path: Path, text: str, message: str) -> None:
    """Whoever reads the error knows which file, which key, and what it may be."""
    file = _yaml(tmp_path, text)
    with pytest.raises(SettingsError, match=message) as caught:
        parse_train_config(["--config", file])
    assert str(caught.value).startswith(f"--config {file}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    """No traceback for a typing error in a path."""
    with pytest.raises(SettingsError, match=r"--config nowhere\.yaml: cannot be read"):
        parse_train_config(["--config", "nowhere.yaml"])


@pytest.mark.parametrize("args", [["--stepz", "3"], ["--model", "huge"], ["--steps", "0"]])
def test_bad_flags_end_with_a_usage_error(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the flag's name, as command lines do."""
    with pytest.raises(SystemExit) as caught:
        parse_train_config(args)
    assert caught.value.code == 2
    assert args[0].removeprefix("--").removesuffix("z") in capsys.readouterr().err


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Every field of every group is in --help, and each has a docstring of its own there."""
    with pytest.raises(SystemExit):
        parse_train_config(["--help"])
    text = capsys.readouterr().out
    for item in fields(TrainConfig):
        nested = fields(item.default_factory) if isinstance(item.default_factory, type) else ()
        for name in [f"{item.name}.{inner.name}" for inner in nested] or [item.name]:
            assert f"--{name.replace('_', '-')}" in text


def test_single_numbers_replace_the_named_size() -> None:
    """model.name gives the start, the other settings change it."""
    shape = ModelSettings(name="gpt-124m", num_layers=3).build().gpt
    assert shape is not None
    assert (shape.num_layers, shape.hidden_size) == (3, 768)


def test_the_learning_rate_follows_the_width_unless_given() -> None:
    """Wider models get a smaller rate by default; a given one is taken as it is."""
    assert TrainConfig(model=ModelSettings(name="gpt-3.6b")).learning_rate < TrainConfig().learning_rate
    masked = TrainConfig(model=ModelSettings(objective="masked"))
    assert masked.learning_rate == pytest.approx(0.4 * TrainConfig().learning_rate)
    assert parse_train_config(["--optimizer.learning-rate", "0.01"]).learning_rate == 0.01


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("seed", 2**64, "at most 18,446,744,073,709,551,615"),
        ("steps", 0, "at least 1"),
        ("micro_steps", 10**12, "at most 1,000,000"),
        ("batch_size", 10**12, "at most 1,000,000"),
        ("global_batch_tokens", "1e30", "at most 10 B tokens per step"),
        ("global_batch", 10**12, "at most 156,250,000 sequences of 64"),
        ("optimizer.learning_rate", ".inf", "at most 1,000"),
        ("optimizer.learning_rate", 0, "a number above 0"),
        ("optimizer.max_grad_norm", ".nan", "a number, found nan"),
        ("optimizer.beta2", 1, "a number below 1"),
        ("launch.timeout_seconds", 10**15, "at most 100,000,000"),
        ("launch.ranks_per_node", 10**6, "at most 1,024"),
        ("launch.hosts", 10**8, "at most 100,000"),
        ("model.num_layers", 10**9, "at most 10,000"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(
    tmp_path: Path, setting: str, value: object, expected: str
) -> None:
    """Not by a traceback of a rank, or never."""
    group, _, name = setting.rpartition(".")
    text = f"{group}: {{{name}: {value}}}" if group else f"{name}: {value}"
    with pytest.raises(SettingsError, match=rf"{setting}: expected {expected}"):
        parse_train_config(["--config", _yaml(tmp_path, text)])


def test_a_step_of_many_tokens_is_refused_though_each_number_may_be() -> None:
    with pytest.raises(SettingsError, match=r"batch_size, micro_steps: expected at most 10,000,000,000 tok"):
        TrainConfig(batch_size=10**6, micro_steps=10**6)
    assert OptimizerSettings(max_grad_norm=float("inf")).max_grad_norm > 1e308  # no clipping


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\0b", "x" * 256])
def test_a_run_cannot_leave_its_folder(name: str) -> None:
    """The run's name is one folder below the output folder."""
    with pytest.raises(SettingsError, match="name"):
        TrainConfig(name=name)


def test_restarts_follow_from_checkpoints() -> None:
    """A run that saves is started again three times, one that does not never, if nothing is set."""
    assert parse_train_config([]).max_restarts == 3
    assert parse_train_config(["--checkpoint.interval", "0"]).max_restarts == 0
    assert parse_train_config(["--launch.max-restarts", "7"]).max_restarts == 7


@pytest.mark.parametrize("written", ["1M", "1e6", "1_000_000", "1000000"])
def test_a_batch_in_tokens_is_read_as_people_write_it(tmp_path: Path, written: str) -> None:
    """In a file and as a flag."""
    file = _yaml(tmp_path, f"global_batch_tokens: {written}")
    for args in (["--config", file], ["--global-batch-tokens", written]):
        assert parse_train_config(args).global_batch_tokens == 1_000_000


def test_help_is_in_the_words_of_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_train_config(["--help"])
    text = capsys.readouterr().out
    assert "{None}" not in text
    for words in ("AdamW beta1.", "Gradient accumulation steps", "Dtype of", "--model.num-layers INT"):
        assert words in text
