"""How long a request waited and ran."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds: waiting before the first step, denoising, and both."""

    queued: float
    running: float

    @property
    def total(self) -> float:
        return self.queued + self.running

    def to_dict(self) -> dict[str, float]:
        """All three, ready for JSON."""
        return {"queued": self.queued, "running": self.running, "total": self.total}
