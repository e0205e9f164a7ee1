"""A sequence's running sum, and the process that keeps it; for tests of sequences."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils

START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
END = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END


class TritonPythonModel:
    """State by sequence id, integer or string."""

    def initialize(self, args):
        """No sequence yet."""
        self._sums = {}

    def execute(self, requests):
        """One response for each request."""
        responses = []
        for request in requests:
            key = request.correlation_id()
            if request.flags() & START:
                self._sums[key] = 0
            # The direct strategy fills empty slots with requests of no sequence.
            value = int(pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()[0, 0])
            self._sums[key] = self._sums.get(key, 0) + value
            values = {"SUM": self._sums[key], "PROCESS": os.getpid()}
            if request.flags() & END:
                del self._sums[key]
            tensors = [pb_utils.Tensor(name, np.array([[value]], np.int32)) for name, value in values.items()]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
