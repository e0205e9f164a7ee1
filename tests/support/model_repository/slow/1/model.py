"""Answers with its input, after as many milliseconds as the largest first element says."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One execution at a time, as long as its slowest row."""

    def execute(self, requests):
        """Sleeps once for all requests of the execution."""
        tensors = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        time.sleep(max(float(values[:, 0].max()) for values in tensors) / 1000)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]) for values in tensors]
