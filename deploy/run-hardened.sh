#!/bin/sh
# run-as-processes.py under what the containers' settings take away; as root on Linux:  deploy/run-hardened.sh
# A mount namespace of its own: everything is read-only but fresh /tmp and /dev/shm. User 10001, no capabilities, no new privileges, no home,
# no variables but PATH. The checkout must not lie in /tmp or /root.
set -eu
if [ "${1:-}" != inside ]; then
  exec unshare --mount --propagation private "$0" inside
fi
root=$(cd "$(dirname "$0")/.." && pwd)
python=$("$root/.venv/bin/python" -c 'import sys; print(sys.base_prefix)')
mount -t tmpfs tmpfs /tmp
case "$python" in
  /root/*) # where only root may look
    mkdir /tmp/python
    mount --bind "$python" /tmp/python
    mount -t tmpfs -o mode=755 tmpfs /root
    mkdir -p "$python"
    mount --bind /tmp/python "$python"
    mount -o remount,ro,bind "$python"
    mount -o remount,ro /root ;;
esac
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -o remount,ro,bind /
cd "$root"
exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
  env -i PATH="$PATH" HOME=/nowhere PYTHONDONTWRITEBYTECODE=1 sh -euc '
    for place in /x deploy/x /root/x; do ! touch "$place" 2>/dev/null || { echo "$place can be written"; exit 1; }; done
    grep -q "^CapBnd:.0*$" /proc/self/status && test "$(id -u)" = 10001
    if .venv/bin/python deploy/run-as-processes.py --keep /tmp/run; then exit 0; fi
    tail -n 20 /tmp/run/*.log; exit 1'
