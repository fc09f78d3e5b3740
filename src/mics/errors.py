"""What users may catch. Messages say what was expected, what was found and what to do."""


class MicsError(RuntimeError):
    """Something mics was asked to do cannot be done."""


class SettingsError(ValueError):
    """A setting, a model or an optimizer that mics cannot train as given."""


UNCOPYABLE = (
    "expected a plain model to copy or pickle, found one that mics.shard() has sharded; copy it "
    "before sharding, "
    "or save mics.full_state_dict(model)"
)


class CollectiveError(MicsError):
    """A collective failed: a rank died, the network was cut, or the timeout passed."""


class CheckpointError(MicsError):
    """A checkpoint cannot be written or read: a torn or altered file, a full disk, another model."""
