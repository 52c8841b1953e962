"""Counters, and their forms for people and for Prometheus."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ucmfs.errors import UcmfsError

__all__ = ["Counters", "RecentLog", "metrics_text"]


@dataclasses.dataclass(slots=True)
class Counters:
    """What one pipeline and its mount did. Plain integers: touched on the trio loop only."""

    hits: int = 0
    """Opens that the Cache served."""
    misses: int = 0
    """Opens that a lower stage had to serve, or none could."""
    fills: int = 0
    filled_bytes: int = 0
    fills_joined: int = 0
    write_backs: int = 0
    written_back_bytes: int = 0
    published: int = 0
    dropped: int = 0
    """Blocks dropped because their writer was killed in the middle, or a write to them failed."""
    corrupt: int = 0
    """Copies that did not match their digest."""
    unexpected: int = 0
    """Exceptions that no code expected; each is in the log with its traceback."""
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    """Errors of stages, as "<stage>:<kind>"."""

    def error(self, stage: str, error: UcmfsError) -> None:
        self.errors[f"{stage}:{type(error).__name__}"] += 1


_HELP = {
    "hits": "Opens that the Cache served",
    "misses": "Opens that the Cache could not serve",
    "fills": "Blocks copied up into the Cache",
    "filled_bytes": "Bytes copied up into the Cache",
    "fills_joined": "Readers that joined a fill under way",
    "write_backs": "Blocks written back to the next stage",
    "written_back_bytes": "Bytes written back to the next stage",
    "published": "Blocks published in the Cache by writers",
    "dropped": "Blocks dropped because their writer was killed or a write to them failed",
    "corrupt": "Copies that did not match their digest",
    "unexpected": "Exceptions that no code expected",
    "eviction_count": "Blocks evicted from the Cache",
}


class _Collector:
    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for key, text in _HELP.items():
            name = {"eviction_count": "evictions"}.get(key, key)
            yield CounterMetricFamily(f"ucmfs_{name}", text, value=self._stats[key])
        errors = CounterMetricFamily("ucmfs_stage_errors", "Errors of stages by kind", labels=["stage", "kind"])
        for key, count in self._stats["errors"].items():
            errors.add_metric(key.split(":", 1), count)
        yield errors
        for key, name, text in (
            ("capacity", "ucmfs_stage_capacity_bytes", "Bytes that the stage may hold"),
            ("used", "ucmfs_stage_used_bytes", "Bytes that the stage holds"),
            ("blocks", "ucmfs_stage_blocks", "Blocks in the stage"),
            ("dirty", "ucmfs_stage_dirty_blocks", "Blocks that the next persistent stage does not have yet"),
            ("dirty_bytes", "ucmfs_stage_dirty_bytes", "Bytes that the next persistent stage does not have yet"),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["stage"])
            for stage in self._stats["stages"]:
                if stage.get(key) is not None:
                    gauge.add_metric([stage["label"]], stage[key])
            yield gauge


def metrics_text(stats: Mapping[str, Any]) -> bytes:
    """*stats* in Prometheus's text form."""
    registry = CollectorRegistry()
    registry.register(_Collector(stats))
    return generate_latest(registry)


class RecentLog(logging.Handler):
    """Keeps the last records for `.ucmfs/log`."""

    def __init__(self, limit: int = 500) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[str] = deque(maxlen=limit)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)
