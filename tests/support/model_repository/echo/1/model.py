"""Answers every input IN_X with the same bytes as OUT_X; for tests of all datatypes."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Each request by itself."""

    def execute(self, requests):
        """One response for each request, with an output for each input that it brought."""
        responses = []
        for request in requests:
            wanted = set(request.requested_output_names())
            outputs = []
            for tensor in request.inputs():
                name = tensor.name().replace("IN_", "OUT_")
                if name in wanted:
                    # DLPack carries BF16, which numpy does not have; BYTES go through numpy, which DLPack cannot carry.
                    if name == "OUT_STRING":
                        outputs.append(pb_utils.Tensor(name, tensor.as_numpy()))
                    else:
                        outputs.append(pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack()))
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
