# SPDX-License-Identifier: Apache-2.0
"""Ray's settings that are environment variables: what it prints, how soon its processes notice that
others are gone, and that no call starts it. Ray reads them when it is imported or started.
"""

from __future__ import annotations

from typing import Literal

_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Else each actor without a device warns that a later Ray will treat its variables differently.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Else ray.wait after ray.shutdown forms a cluster of its own.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # The driver prints what raylets tell it, such as the death of a worker, unless this matches.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
_RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""After this time processes whose head is gone end, by default a minute."""
_NODES = {_RECONNECT_S: "8"}
_ONE_MACHINE = {
    _RECONNECT_S: "4",
    # On any system: use the loopback interface instead of asking the network for an address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def ray_environment(role: Literal["local", "existing", "head", "member"]) -> dict[str, str]:
    """What Ray's processes on this node, the driver included, get beside their own variables."""
    if role == "existing":
        return dict(_ALWAYS)
    return _ALWAYS | (_ONE_MACHINE if role == "local" else _NODES)
