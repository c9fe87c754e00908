#!/usr/bin/env bash
# slurm_cluster.sh: a Slurm cluster of several "nodes" on this one machine, for tests. Needs root.
#
#   slurm_cluster.sh start FOLDER [NODES] [CPUS]   # munged, slurmctld, NODES slurmd (2) of CPUS cores (2)
#   slurm_cluster.sh exec FOLDER COMMAND...        # on the first node, with SLURM_CONF set: sbatch, srun, ...
#   slurm_cluster.sh stop FOLDER                   # ends the jobs and what was started here, and nothing else
#
# A node is a network name space with an address, a host name, a /dev/shm and an IPC name space of its own; nodes meet
# on a bridge in one more name space. Nothing outside of FOLDER and of these name spaces is changed. FOLDER: a short
# path.
set -euo pipefail

die() {
  echo "slurm_cluster: $*" >&2
  exit 1
}
command=${1:-} folder=$(realpath -m "${2:?usage: slurm_cluster.sh start|exec|stop FOLDER ...}")
shift 2
conf=$folder/slurm.conf
prefix=gyre$(cksum <<<"$folder" | cut -d' ' -f1)

# on NODE COMMAND...: in the node's name spaces. Not `ip netns exec`: its /sys has no cgroups, which slurmd needs.
on() {
  local node=$1
  shift
  # shellcheck disable=SC2016  # for the inner shell
  nsenter --net="/run/netns/$prefix$node" unshare --mount --uts --ipc bash -c '
    set -e
    hostname "$1"
    mount --bind "$2/hosts" /etc/hosts
    mount --rbind /sys/fs/cgroup "$2/cgroup"
    mount -t sysfs sysfs /sys
    mount --rbind "$2/cgroup" /sys/fs/cgroup
    mount -t tmpfs -o size=2g tmpfs /dev/shm
    shift 2
    exec "$@"' _ "$node" "$folder" "$@"
}

make_nodes() {
  local number
  ip netns add "${prefix}net"
  ip -n "${prefix}net" link add bridge0 type bridge
  ip -n "${prefix}net" link set bridge0 up
  echo '127.0.0.1 localhost' >"$folder/hosts"
  for number in $(seq "$1"); do
    ip netns add "${prefix}n$number"
    ip -n "${prefix}net" link add "p$number" type veth peer name eth0 netns "${prefix}n$number"
    ip -n "${prefix}net" link set "p$number" master bridge0 up
    ip -n "${prefix}n$number" link set lo up
    ip -n "${prefix}n$number" addr add "10.213.0.$number/24" dev eth0
    ip -n "${prefix}n$number" link set eth0 up
    ip netns exec "${prefix}n$number" sysctl -qw net.ipv4.tcp_congestion_control=reno
    echo "10.213.0.$number n$number" >>"$folder/hosts"
  done
}

# write_configuration NODES CPUS. The controller does not wait before it starts a job; memory is shared by all nodes.
write_configuration() {
  local memory
  memory=$(awk '/MemTotal/ { print int($2 / 1024 * 0.8) }' /proc/meminfo)
  cat >"$conf" <<CONF
ClusterName=test
SlurmctldHost=n1(10.213.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/controller
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=pmi2
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=5
MinJobAge=300
NodeName=n[1-$1] NodeAddr=10.213.0.[1-$1] CPUs=$2 Sockets=1 CoresPerSocket=$2 ThreadsPerCore=1 RealMemory=$memory
PartitionName=main Nodes=n[1-$1] Default=YES MaxTime=60 State=UP OverSubscribe=NO
CONF
}

start() {
  local nodes=${1:-2} cpus=${2:-2} number program
  [[ $(id -u) -eq 0 ]] || die "it needs root"
  for program in munged slurmctld slurmd sinfo ip nsenter; do
    command -v "$program" >/dev/null || die "no $program (Debian: slurm-wlm slurm-wlm-basic-plugins munge iproute2)"
  done
  [[ ! -e $conf ]] || die "$folder: a cluster is there; stop it first"
  mkdir -p "$folder/controller" "$folder/cgroup"
  chmod 755 "$folder"
  for number in $(seq "$nodes"); do mkdir -p "$folder/spool.n$number"; done
  make_nodes "$nodes"
  write_configuration "$nodes" "$cpus"
  (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
  munged --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
  export SLURM_CONF=$conf
  on n1 slurmctld -f "$conf" -c
  for number in $(seq "$nodes"); do on "n$number" slurmd -f "$conf" -N "n$number"; done
  for number in $(seq 100); do
    [[ $(on n1 sinfo --noheader --format='%D %t' 2>/dev/null) != "$nodes idle" ]] || return 0
    sleep 0.1
  done
  on n1 sinfo --list-reasons >&2 || true
  tail -n 20 "$folder"/*.log >&2
  stop
  die "the nodes were not idle after 10 s"
}

# Pids of the daemons that still run; the pid may be another process's by now.
daemons() {
  local file pid
  for file in "$folder"/slurmd.*.pid "$folder/slurmctld.pid" "$folder/munged.pid"; do
    [[ -s $file ]] || continue
    pid=$(<"$file")
    if grep -qzF "$folder" "/proc/$pid/cmdline" 2>/dev/null; then echo "$pid"; fi
  done
}

end_daemons() {
  local pid
  for pid in $(daemons); do kill "-$1" "$pid" 2>/dev/null || true; done
}

stop() {
  local space pid
  [[ -e $conf ]] || return 0
  export SLURM_CONF=$conf
  on n1 timeout 5 scancel --user=root 2>/dev/null || true
  for _ in $(seq 50); do
    [[ -n $(on n1 timeout 5 squeue --noheader 2>/dev/null) ]] || break
    sleep 0.1
  done
  end_daemons TERM
  for _ in $(seq 50); do
    [[ -n $(daemons) ]] || break
    sleep 0.1
  done
  end_daemons KILL
  for space in $(ip netns list | awk -v p="^$prefix" '$1 ~ p { print $1 }'); do
    for pid in $(ip netns pids "$space" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null || true; done
    ip netns del "$space"
  done
  rm -rf "$folder"
}

case $command in
  start) start "$@" ;;
  stop) stop ;;
  exec)
    export SLURM_CONF=$conf
    on n1 "$@"
    ;;
  *) die "unknown command '$command'; start, exec or stop" ;;
esac
