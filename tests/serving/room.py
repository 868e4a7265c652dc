"""The room that running requests leave, as the tests count it."""

from collections.abc import Sequence
from fractions import Fraction

from jdllm.serving.demands import Life, Limits
from tests.serving.scripts import Script

SHARE = Fraction(7, 8)
"""Of places, pages and rows, for one call where clients share the engine."""


class Room:
    """What requests may take together.

    Arguments:
    - `limits`: what the engine has room for.
    """

    def __init__(self, limits: Limits):
        self._limits = limits

    def takes_pool(self, life: Life) -> bool:
        return life.alone or (life.pages == 0 and life.rows > self._limits.beside_pool)

    def group(self, script: Script) -> str | int:
        """Requests that need the same room."""
        return "pages" if script.life.pages else "held" if script.life.holds else script.call

    def needs(self, script: Script) -> tuple[str | int, bool]:
        return self.group(script), self.takes_pool(script.life)

    def stands_before(self, script: Script, other: Script) -> bool:
        """Whether a request that waits may keep another waiting: they need the same."""
        needs_pages = [one.life.pages > 0 or self.takes_pool(one.life) for one in (script, other)]
        return all(needs_pages) or self.group(script) == self.group(other)

    def fits(self, script: Script, running: Sequence[Script]) -> bool:
        """Whether a request may start beside those that run, as far as room goes."""
        life, takes_pool = script.life, self.takes_pool
        group = [other.life for other in running if self.group(other) == self.group(script)]
        lives = [other.life for other in running]
        return (
            not self.has_its_share(script, running)
            and len(group) < self._limits.max_num_seqs
            and sum(other.pages for other in lives) + life.pages <= self._limits.pages
            and (
                life.pages > 0
                or not group
                or sum(other.rows for other in group) + life.rows <= self._limits.whole_rows
            )
            and not (takes_pool(life) and any(other.pages for other in lives))
            and not (life.pages and any(map(takes_pool, lives)))
            and not (life.alone and any(map(takes_pool, lives)))
            and not (takes_pool(life) and any(other.alone for other in lives))
        )

    def has_its_share(self, script: Script, running: Sequence[Script]) -> bool:
        """Whether the call of a request would leave too little to others if the request started too."""
        limits, group = self._limits, self.group(script)
        own = [other for other in running if other.call == script.call and self.group(other) == group]
        if not (own and limits.shared and isinstance(group, str)):
            return False
        lives = [other.life for other in (*own, script)]
        room = [(len(lives), limits.max_num_seqs)]
        if group == "pages":
            room.append((sum(life.pages for life in lives), limits.pages))
        else:
            room.append((sum(life.rows for life in lives), limits.whole_rows))
        return any(taken > SHARE * most for taken, most in room)
