"""HTTP: the OpenAI-compatible API over the engine, and the studio page. Thin: validate, submit, stream."""
