"""Decoupled: answers each request as many times as it says, with a pause before each; for tests of streams."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FAILS = 666
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Counts from 0 on; says with each answer how many requests were cancelled before their last one."""

    def initialize(self, args):
        """One count for all requests."""
        self._num_cancelled = 0

    def execute(self, requests):
        """A thread for each request, so that requests overlap."""
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            delay = pb_utils.get_input_tensor_by_name(request, "DELAY_MS")
            delay_s = 0.0 if delay is None else float(delay.as_numpy()[0]) / 1000
            sender = request.get_response_sender()
            threading.Thread(target=self._answer, args=(count, delay_s, sender), daemon=True).start()

    def _answer(self, count, delay_s, sender):
        """666 fails after one answer."""
        for index in range(count):
            time.sleep(delay_s)
            if sender.is_cancelled():
                self._num_cancelled += 1
                break
            if count == FAILS and index == 1:
                error = pb_utils.TritonError("this model does not count to 666", pb_utils.TritonError.INVALID_ARG)
                sender.send(pb_utils.InferenceResponse(error=error))
                break
            values = {"INDEX": index, "CANCELLED": self._num_cancelled}
            tensors = [pb_utils.Tensor(name, np.array([value], np.int32)) for name, value in values.items()]
            sender.send(pb_utils.InferenceResponse(tensors))
        sender.send(flags=FINAL)
