#!/usr/bin/env bash
# One-node Ceph with an S3 gateway on this machine, for the tests of object stores by hand; all in memory, nothing kept.
#
#   apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common
#   tests/support/ceph_server.sh DIRECTORY [PREFIX]     # PREFIX: where the packages were unpacked, if not installed
#   AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=testtest \
#       python -m pytest tests/contract/test_object_storage.py tests/faults/test_object_faults.py \
#       -k 's3 or S3' --s3-address 127.0.0.1:17480
#   kill $(cat DIRECTORY/*.process)
#
# The bucket `contract` has to be made with any client first.
set -euo pipefail
directory=$(realpath -m "$1") prefix=${2:-}
lib=$prefix/usr/lib/x86_64-linux-gnu
if [ -n "$prefix" ]; then
    export PATH=$prefix/usr/bin:$PATH LD_LIBRARY_PATH=$lib:$lib/ceph:$prefix/lib/x86_64-linux-gnu
    export PYTHONPATH=$prefix/usr/lib/python3/dist-packages
fi
fsid=$(cat /proc/sys/kernel/random/uuid) osd=$(cat /proc/sys/kernel/random/uuid)
addresses="[v2:127.0.0.1:3300,v1:127.0.0.1:16789]"
mkdir -p "$directory"/{mon,osd,rgw}
cat > "$directory/ceph.conf" <<CONF
[global]
fsid = $fsid
mon host = $addresses
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
ms client mode = crc
ms mon client mode = crc
ms mon service mode = crc
ms service mode = crc
ms bind ipv6 = false
run dir = $directory
log file = $directory/\$name.log
admin socket = $directory/\$name.asok
plugin dir = $lib/ceph
erasure code dir = $lib/ceph/erasure-code
osd class dir = $lib/rados-classes
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
[mon.a]
mon data = $directory/mon
[osd.0]
osd data = $directory/osd
osd objectstore = memstore
memstore device bytes = 8589934592
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:17480
rgw data = $directory/rgw
CONF
export CEPH_CONF=$directory/ceph.conf CEPH_ARGS="-c $directory/ceph.conf"
start() { "$@" -f > "$directory/$1.out" 2>&1 & echo $! > "$directory/$1.process"; }

monmaptool --create --addv a "$addresses" --fsid "$fsid" "$directory/monmap"
ceph-mon --mkfs -i a --monmap "$directory/monmap"
start ceph-mon -i a
timeout 60 ceph osd new "$osd"
ceph-osd -i 0 --mkfs --osd-uuid "$osd" --mkkey --no-mon-config
start ceph-osd -i 0
timeout 60 sh -c 'until ceph osd stat | grep -q "1 up"; do sleep 1; done'
start radosgw -n client.rgw
timeout 120 sh -c 'until curl --silent --output /dev/null http://127.0.0.1:17480/; do sleep 1; done'
timeout 60 radosgw-admin -n client.rgw user create --uid=test --display-name=test --access-key=test --secret-key=testtest
