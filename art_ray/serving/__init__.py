"""WHAT SAMPLES: one vLLM engine behind a front that knows, for every token, which policy version sampled it.

`config` and `adapter` say what goes in, `leases` decides which version answers, `front` guards and labels every
answer, `engine` runs vLLM. Ray is not known here; vLLM is imported by `engine` alone, when it starts.
"""
