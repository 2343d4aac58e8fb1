#!/bin/sh
# hosts.sh COMMAND...: runs the command on one of two hosts, which are a pair of network namespaces with a cable between them.
# The other one's namespaces are those of the process OTHER: the command takes part of itself there (both_hosts.py).
# host-a has the address 10.77.0.1 and the interface `cable`, host-b 10.77.0.2 and `socket`.  Ends with the command's status.
# Needs no privilege where user namespaces are allowed, and leaves nothing behind: everything goes with the last process in it.
if [ "$INSIDE" != 1 ]; then
    export INSIDE=1
    exec unshare --user --map-root-user --net --uts --pid --fork --kill-child --mount-proc "$0" "$@"
fi
set -e
unshare --net --uts sleep 600 &
other=$!
ip link set lo up
ip link add cable type veth peer name socket
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link set socket netns $other
ip addr add 10.77.0.1/24 dev cable
ip link set cable up
there="nsenter --target $other --net --uts"
$there ip link set lo up
$there ip addr add 10.77.0.2/24 dev socket
$there ip link set socket up
hostname host-a
$there hostname host-b
set +e
OTHER=$other "$@"
status=$?
ip -s link show cable | sed -n '4p;6p'
kill $other
exit $status
