"""The sample models of `model_repository/`: where their weights come from and how the ONNX files are built.

`python -m serve_app.samples` builds what is missing. Nothing here is needed to serve models.
"""
