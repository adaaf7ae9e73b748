#!/bin/sh
# On one Linux machine with NVIDIA GPUs: set up, verify over NCCL on 1, 2, 4 ... of them, then JupyterLab for an ssh tunnel.
# From a clone:  cloud/gpu.sh            PORT=9000 cloud/gpu.sh  takes another port than 8888
set -eu
cd "$(dirname "$0")/.."
port=${PORT:-8888}
python=${ZEROLAB_VENV:-$PWD/.venv}/bin/python

if ! command -v nvidia-smi >/dev/null; then
    echo "No nvidia-smi here, so no NVIDIA driver. Without GPUs, ./zero lab is all you need." >&2
    exit 1
fi
nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv
nvidia-smi topo -m || true # which pairs of GPUs talk over NVLink, and which over PCIe; some machines hide it

ZEROLAB_TORCH=default ./zero plan --help >/dev/null # sets up
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" = 0 ]; then
    "$python" -c 'import torch; print("torch", torch.__version__, "is built for CUDA", torch.version.cuda)' >&2
    echo "It sees no GPU: the driver above is too old for that CUDA, CUDA_VISIBLE_DEVICES hides the GPUs, or," >&2
    echo "where it says None, pip was told to take a CPU build." >&2
    exit 1
fi

worlds=1 next=2
while [ "$next" -le "$gpus" ]; do
    worlds="$worlds $next" next=$((2 * next))
done
# shellcheck disable=SC2086 # one word for each world size
./zero verify --stage 0 1 2 3 --world-size $worlds || echo "verify ended with $?: read its table above." >&2

echo "On your own computer:  ssh -N -L $port:127.0.0.1:$port USER@THIS-MACHINE   then open the 127.0.0.1 address below."
exec ./zero lab --no-browser --ip=127.0.0.1 --port="$port" --ServerApp.port_retries=0
