# syntax=docker/dockerfile:1
FROM python:3.12-slim AS build
# Beside serve: cuda13, cuda12, or nothing for a CPU.
ARG EXTRA=cuda13
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY jdllm jdllm
RUN python -m venv /opt/jdllm \
    && /opt/jdllm/bin/pip install --no-cache-dir ".[serve${EXTRA:+,$EXTRA}]"

FROM python:3.12-slim
RUN useradd --system --uid 10001 --no-create-home --home-dir /cache jdllm \
    && install --directory --owner jdllm --mode 0700 /cache
COPY --from=build /opt/jdllm /opt/jdllm
# What is compiled, and models by hub id, are kept in /cache.
ENV PATH=/opt/jdllm/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# A first start compiles for minutes before the port answers.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["jdllm", "serve", "--host", "0.0.0.0"]
