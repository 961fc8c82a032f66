"""What is shipped: a policy of a run by itself, and a cost model as an ONNX file."""
