"""Metrics of the files that a process reads again when they change (watched_files.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from baton.runtime.metrics import FILES, MetricList, Values
from baton.runtime.rotation.deployment_secret import secret_file
from baton.runtime.rotation.watched_files import WatchedFiles


class Certificate(Protocol):
    """Files of a certificate (baton/runtime/tls.py). Equal ones are shown once."""

    def expiration(self) -> WatchedFiles[float]: ...


def watch_files(
    registry: CollectorRegistry,
    secret: str | None,
    tls: Iterable[Certificate | None],
    others: Sequence[WatchedFiles[Any]] = (),
) -> None:
    """Export the metrics of FILES for the file of the secret, certificates and other files.

    Once per process. Each scrape looks at the files, so that a broken one shows also while nobody
    connects. Raises ConfigError for files that cannot be used.
    """
    files = [*others] if secret is None else [*others, secret_file(secret)]
    ends = [each.expiration() for each in dict.fromkeys(tls) if each is not None]
    watch_values(registry, files, ends)


def watch_values(
    registry: CollectorRegistry,
    files: Sequence[WatchedFiles[Any]],
    certificates: Sequence[WatchedFiles[float]],
) -> None:
    """As `watch_files`. The values of `certificates` are seconds since 1970."""

    def values() -> Mapping[str, Values]:
        for each in files:
            each.value()
        ends = {(each.name,): each.value() for each in certificates}
        every = (*files, *certificates)
        return {
            "baton_file_last_reload_successful": {
                (each.name,): float(each.succeeded) for each in every
            },
            "baton_file_last_reload_success_timestamp_seconds": {
                (each.name,): each.read_at for each in every
            },
            "baton_certificate_expiration_timestamp_seconds": ends,
        }

    MetricList(*FILES).watch(registry, values)
