# An image that holds a model, for the chart's value model.image. The build's context is its folder:
#   docker build -f deploy/kubernetes/model.Dockerfile -t baton-demo-model demo_model
FROM busybox:1.37
COPY . /model
USER 10001
