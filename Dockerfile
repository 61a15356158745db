# Build from a clone, not from a git worktree: records name the commit, and a worktree's .git points outside the image.
#
# docker build -t birder .
# docker run --rm --privileged -v "$PWD/results/local:/birder/results/local" birder make resnet50 NODES=4
# docker run --rm birder make predict MODEL=hf:gpt2-medium GPU=h100 BATCH=8 SEQ=1024 NODES=4
# docker run --rm --gpus all -v "$PWD/outputs:/birder/outputs" birder make gpu-check
#
# -v: keeps the results; without it they are lost with the container.
# --privileged: emulated nodes are network namespaces; without it they talk over loopback, and the output says so.
# --gpus all: needs NVIDIA's container toolkit on the host.
# gcc, libc6-dev: Triton compiles its launcher when it first runs. The image is larger than 5 GB, most of it PyTorch.
FROM python:3.11-slim
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends gcc git iproute2 libc6-dev make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /birder
COPY . .
RUN make setup
CMD ["make", "help"]
