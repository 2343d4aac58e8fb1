# Groupwise in a container.
#
#   docker build -t groupwise .                                  torch as pip has it: CUDA, also for CPUs
#   docker build -t groupwise --build-arg TORCH_INDEX=ADDRESS .  another build of torch, e.g. the small one for
#                                                                CPUs: ADDRESS is on PyTorch's site, "Get started"
#   docker run --rm -v "$PWD:/work" groupwise train demo
#   docker run --rm --gpus all -v "$PWD:/work" groupwise train my.yaml
#
# The kernels for CPUs are compiled for the processor that builds the image.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /groupwise
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY recipes recipes
COPY packages packages

ARG TORCH_INDEX=""
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"; fi \
    && pip install --no-cache-dir -c constraints.txt -e '.[peft]' setuptools \
    && pip install --no-cache-dir --no-build-isolation --no-deps ./packages/groupwise-cpu

WORKDIR /work
ENTRYPOINT ["groupwise"]
CMD ["--help"]
