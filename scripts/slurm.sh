#!/bin/bash
# Train on several nodes of a SLURM cluster, from a checkout on a disk that all nodes share:
#
#     sbatch --nodes 2 --gpus-per-node 4 scripts/slurm.sh --algo ddpg --num_envs 65536
#     sbatch --nodes 2 --gpus-per-node 4 scripts/slurm.sh --resume runs/ddpg_snakes_3v3/0003
#
# The words behind the script are those of `python -m jaxrl.train`; add --account, --partition and --time as your
# cluster wants them. PYTHON names the interpreter (default: .venv/bin/python of the checkout, which `make` makes).
#
# One task per node drives all of its GPUs. For a task per GPU, which keeps the work of the host apart, give
#     sbatch --nodes 2 --gpus-per-node 4 --ntasks-per-node 4 scripts/slurm.sh ...
# Each task then takes the GPU of its local number; leave --gpus-per-task out, or every task sees one GPU and takes it.
#
# The number of devices must divide the logical shards (8 for most runs): 2, 4 or 8 GPUs in all. Five minutes before
# the time limit SLURM sends SIGTERM: the run finishes its block, saves and ends; go on with --resume.
#
#SBATCH --job-name=jaxrl
#SBATCH --output=slurm-%j.out
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@300

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

if [ $# -eq 0 ]; then
    echo "slurm.sh: say what to train, for example --algo ddpg --num_envs 65536" >&2
    exit 2
fi

# A proxy that is set for downloads would also be asked for the coordinator.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY

# One bad end is enough: the other tasks end by themselves, each with its sentence.
exec srun --kill-on-bad-exit=0 "${PYTHON:-.venv/bin/python}" -u -m jaxrl.train "$@"
