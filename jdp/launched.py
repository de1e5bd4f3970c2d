"""What `jdp launch` tells the processes it starts, as one more cluster that JAX detects.

In: the environment variables JDP_COORDINATOR, JDP_NUM_PROCESSES and JDP_PROCESS_ID, which anybody
may set. Out: what `jax.distributed.initialize()` asks of a cluster. Importing this module makes it
the first that is looked for: within a SLURM job, `jdp launch` is nearer than SLURM.
"""

import os
from pathlib import Path

from jax._src import clusters

_NAMES = ("JDP_COORDINATOR", "JDP_NUM_PROCESSES", "JDP_PROCESS_ID")


def tell_joined() -> None:
    """Lets the launcher know that this process does not run on its own."""
    if mark := os.environ.get("JDP_JOINED"):
        Path(mark).touch()


class Launched(clusters.ClusterEnv):
    """The processes that one `jdp launch` has started."""

    name = "jdp"

    @classmethod
    def is_env_present(cls) -> bool:
        """Whether the variables are set.

        Raises:
            ValueError: If only some of them are.
        """
        missing = [name for name in _NAMES if name not in os.environ]
        if 0 < len(missing) < len(_NAMES):
            raise ValueError(
                f"{' and '.join(missing)} must be set, too: the address, the number of processes "
                f"and the id of this one make sense only together"
            )
        return not missing

    @classmethod
    def get_coordinator_address(
        cls, timeout_secs: int | None, override_coordinator_port: str | None
    ) -> str:
        """The address of process 0."""
        del timeout_secs
        address = os.environ["JDP_COORDINATOR"]
        port = override_coordinator_port
        return f"{address.rpartition(':')[0]}:{port}" if port else address

    @classmethod
    def get_process_count(cls) -> int:
        """How many there are."""
        tell_joined()
        return int(os.environ["JDP_NUM_PROCESSES"])

    @classmethod
    def get_process_id(cls) -> int:
        """Which of them this is."""
        return int(os.environ["JDP_PROCESS_ID"])

    @classmethod
    def get_local_process_id(cls) -> int | None:
        """Which GPU it uses: all are on one machine, each has one."""
        return int(os.environ["JDP_PROCESS_ID"]) if "JDP_JOINED" in os.environ else None


clusters.ClusterEnv._cluster_types.remove(Launched)
clusters.ClusterEnv._cluster_types.insert(0, Launched)
