"""Answers with its input, but refuses, fails or dies on certain values; for tests of faults."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils

RAISES = 666.0
DIES = 999.0


class TritonPythonModel:
    """An identity with moods."""

    def execute(self, requests):
        """NaN is refused for its request alone, 666 raises for the whole execution, 999 ends the process."""
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if (values == DIES).any():
                os._exit(1)
            if (values == RAISES).any():
                raise ValueError("this model does not like 666")
            if np.isnan(values).any():
                error = pb_utils.TritonError("NaN is refused", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
        return responses
