#!/usr/bin/env bash
# Environments of the public packages that bench/bench_step.py compares with and that tests/peers checks exports against:
# one per package, CPU only, unmodified packages.
#
#   bench/peers/make_envs.sh [FOLDER] [NAME...]      FOLDER .cache/peers, NAME specforge nemo_automodel speculators dflash
#
# The packages declare servers and GPU kernels that a CPU cannot install, so they are installed without dependencies, after
# the ones that their step modules import. A finished environment is left alone.
set -euo pipefail

folder=${1:-.cache/peers}
shift || true
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(specforge nemo_automodel speculators dflash)

common=(transformers==5.18.0 datasets tqdm requests loguru pydantic-settings typer rich httpx openai aiohttp accelerate
        psutil triton sentencepiece protobuf einops pillow torchdata tiktoken numpy)

for name in "${names[@]}"; do
    env=$folder/$name
    case $name in
        specforge) packages=(specforge==0.2.0 flash-linear-attention fla-core) ;;
        nemo_automodel) packages=(nemo_automodel==0.7.0 flash-linear-attention fla-core) ;;
        speculators) packages=(speculators==0.9.0 hs-connectors==0.9.0) ;;
        dflash) packages=(dflash==0.1.0) ;;
        *) echo "unknown peer $name; known: specforge nemo_automodel speculators dflash" >&2; exit 2 ;;
    esac
    if [ -e "$env/done" ]; then
        echo "$name: $env is there"
        continue
    fi
    rm -rf "$env"
    "${PYTHON:-python3}" -m venv "$env"
    "$env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
    "$env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 "${common[@]}"
    "$env/bin/pip" install --quiet --disable-pip-version-check --no-deps "${packages[@]}"
    "$env/bin/pip" freeze --disable-pip-version-check > "$env/done"
    echo "$name: $env made"
done
