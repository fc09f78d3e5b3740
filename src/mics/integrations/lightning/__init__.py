"""Lightning: ``Trainer(strategy=MicsStrategy(...))`` and ``Fabric(strategy=MicsFabricStrategy(...))``."""

from mics.utils.extras import require

require("lightning", "mics.integrations.lightning")

from mics.integrations.lightning.fabric import MicsFabricStrategy  # noqa: E402
from mics.integrations.lightning.trainer import MicsStrategy  # noqa: E402

__all__ = ["MicsFabricStrategy", "MicsStrategy"]
