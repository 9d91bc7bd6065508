# syntax=docker/dockerfile:1
#
#   make image                 for a CPU
#   make image DEVICE=cuda     for NVIDIA GPUs; run it with --gpus all
#   docker run -p 8000:8000 -v tokenspeed:/home/tokenspeed/.cache tokenspeed:cpu smollm2

ARG PYTHON_VERSION=3.12
FROM python:${PYTHON_VERSION}-slim

ARG DEVICE=cpu

# make builds .venv; Triton compiles a launcher for each kernel with gcc.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends make $([ "$DEVICE" = cpu ] || echo gcc libc6-dev) \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/tokenspeed
COPY pyproject.toml constraints-cpu.txt Makefile README.md LICENSE ./
COPY src src
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "$DEVICE" = cuda ]; \
    then make install EXTRAS=gpu,structured; \
    else make install EXTRAS=structured TORCH_INDEX=https://download.pytorch.org/whl/cpu; \
    fi

# The checkout stays readable and belongs to the user, so that an overlay or a bind mount of src can be reloaded.
RUN useradd --create-home tokenspeed \
 && mkdir /home/tokenspeed/.cache \
 && chown --recursive tokenspeed: /opt/tokenspeed/src /home/tokenspeed
USER tokenspeed
ENV PATH=/opt/tokenspeed/.venv/bin:$PATH
VOLUME /home/tokenspeed/.cache
EXPOSE 8000

HEALTHCHECK --interval=30s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["ts", "serve", "--host", "0.0.0.0"]
CMD ["smollm2"]
