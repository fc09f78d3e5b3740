"""What users may catch. Messages say what was expected, what was found and what to do."""


class MicsError(RuntimeError):
    """Something mics was asked to do cannot be done."""


class ReplicaError(MicsError):
    """Ranks that must hold equal parameters do not: ``ranks`` stand out in ``units``, as of ``step``."""

    def __init__(
        self,
        message: str,
        *,
        ranks: tuple[int, ...] = (),
        units: tuple[str, ...] = (),
        step: int = 0,
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.units = units
        self.step = step


class SettingsError(MicsError, ValueError):
    """A setting, a model or an optimizer that mics cannot train as given."""


class MissingExtraError(SettingsError, ImportError):
    """A package is not installed that only some users need: one of an extra of the distribution."""


UNCOPYABLE = (
    "expected a plain model to copy or pickle, found one that mics.shard() has sharded; copy it "
    "before sharding, "
    "or save mics.full_state_dict(model)"
)


UNTRACEABLE = (
    "parameters of a model that mics.shard() has sharded are only there while it computes; to export it, "
    "build the plain model again, load mics.full_state_dict(model) into it and export that one"
)


class CollectiveError(MicsError):
    """A collective failed: a rank died, the network was cut, or the timeout passed."""


class CheckpointError(MicsError):
    """A checkpoint cannot be written or read: a torn or altered file, a full disk, another model."""
