# CPU:         docker build -t jaxrl .
# NVIDIA GPU:  docker build -t jaxrl --build-arg EXTRA=cuda13 .   (driver 580 or newer; cuda12: 525)
# then:        docker run --rm -v "$PWD:/runs" jaxrl jaxrl-train --config coma_quick    (--gpus all for a GPU)
FROM python:3.12-slim
ARG EXTRA=""
COPY . /source
RUN /source/.ci/install /opt/jaxrl "$EXTRA" && rm -rf /root/.cache
ENV PATH=/opt/jaxrl/bin:$PATH
WORKDIR /runs
CMD ["jaxrl-doctor"]
