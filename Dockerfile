# docker build -t birder .
# docker run --rm --privileged birder make resnet50 NODES=4
# docker run --rm birder make predict MODEL=hf:gpt2-medium GPU=h100 BATCH=8 SEQ=1024 NODES=4
#
# --privileged: emulated nodes are network namespaces; without it they talk over loopback, and the output says so.
FROM python:3.11-slim
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends git iproute2 make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /birder
COPY . .
RUN make setup
CMD ["make", "help"]
