"""``python -m pdd.link.packet.enter [--own-sysfs] USER_NAMESPACE NAMESPACE COMMAND...``: a command at a site.

A program of its own since only a process with one thread may change its user namespace.
"""

import os
import sys
from collections.abc import Sequence

from pdd.link.packet.namespaces import NamespacesRefusedError, enter


def main(argv: Sequence[str]) -> int:
    """Does not return if all is well: the command takes this process's place."""
    own_sysfs = bool(argv) and argv[0] == "--own-sysfs"
    user_namespace, namespace, *command = argv[own_sysfs:]
    try:
        enter(user_namespace=user_namespace, namespace=namespace, own_sysfs=own_sysfs)
        os.execvp(command[0], command)  # noqa: S606  # the command is the caller's to choose
    except (NamespacesRefusedError, OSError) as error:
        sys.stderr.write(f"{command[0]} cannot run at the site: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
