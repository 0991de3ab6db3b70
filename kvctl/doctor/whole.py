"""All checks of `kvctl doctor` on this host."""

from __future__ import annotations

from kvctl.cli.settings import Settings
from kvctl.doctor.checks import answered, checked
from kvctl.views.doctor import Check


def whole_checks(settings: Settings, *, quick: bool) -> list[Check]:
    """What is looked at, in the order in which it is shown; ``quick``: without having backends move bytes."""
    from kvctl.doctor.host_checks import host_checks
    from kvctl.doctor.kvd_checks import kvd_checks
    from kvctl.doctor.loaded_checks import loaded_checks

    checks, workers = kvd_checks(settings)
    if workers is not None:
        from kvctl.doctor.request_checks import request_checks
        from kvctl.doctor.transfer_checks import transfer_checks

        checks += answered(transfer_checks, settings)
        checks += answered(request_checks, settings)
    else:
        checks.append(checked("transfers", "skipped", "TRANSFERS", "kvd does not answer"))
    checks += host_checks(workers or ())
    checks += loaded_checks(workers or ())
    if not quick:
        from kvctl.doctor.backend_checks import backend_checks

        checks += backend_checks()
    return checks
