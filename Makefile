# make demo, make test and make lint each build what they need in .venv.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch
BIN    := $(VENV)/bin

.PHONY: demo test test-gpu lint clean
