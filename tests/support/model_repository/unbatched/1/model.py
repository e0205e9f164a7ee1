"""Answers with its input, one row of any length; takes one request at a time."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """An identity without a batch dimension."""

    def execute(self, requests):
        """One response for each request."""
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
