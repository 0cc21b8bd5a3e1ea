#!/usr/bin/env bash
# A drafter for a real LLM, from nothing to the folder that vLLM loads, on the CPU: SmolLM2-135M-Instruct.
#
#   python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e '.[bench]'
#   examples/train_smollm2.sh        # about an hour on one busy core; stop it and start it again at will
#
# Each step is what you would do for your own target: questions, answers by the target itself, `dflash extract`,
# `dflash train`, `dflash export`. What a step has done is kept in $WORK, and a second call goes on from there.
# For a try in minutes: WORK=./try QUESTIONS=64 STEPS=20 examples/train_smollm2.sh
set -euo pipefail

here=$(dirname "$0")
PYTHON=${PYTHON:-.venv/bin/python}
WORK=${WORK:-smollm2}
QUESTIONS=${QUESTIONS:-640}     # conversations to train on
HELD_OUT=${HELD_OUT:-32}        # conversations to measure on, about other things
ANSWER=${ANSWER:-96}            # longest answer, in tokens
STEPS=${STEPS:-700}             # optimizer steps
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

say() { printf '\n== %s\n' "$*"; }

mkdir -p "$WORK"
say "The target: SmolLM2-135M-Instruct, converted once"
TARGET=${TARGET:-$("$PYTHON" "$here/../benchmarks/smollm2.py")}
export HF_HUB_OFFLINE=1
echo "$TARGET"

say "Questions, and the target's own greedy answers"
"$PYTHON" "$here/questions.py" --count "$QUESTIONS" --out "$WORK/questions.jsonl" \
  --held-out "$HELD_OUT" --held-out-to "$WORK/held-out-questions.jsonl"
for part in held-out-:held-out.jsonl :chats.jsonl; do
  "$PYTHON" "$here/answer.py" --target "$TARGET" --chats "$WORK/${part%%:*}questions.jsonl" --out "$WORK/${part#*:}" \
    --max-new-tokens "$ANSWER"
done

say "Hidden states"
# This tokenizer has no mask token, and a token for every embedding row: <empty_output> is one that no chat holds.
"$PYTHON" -m dflash_tool extract --target "$TARGET" --data "$WORK/chats.jsonl" --out "$WORK/store" --mask-token-id 16

say "Training"
# Small for the sake of time: 2 layers, 5 drafts a block, 16 blocks a conversation. At a low tau the first slots decide,
# so the decay is steep (--gamma). Steps are small too, so that there are many of them.
"$PYTHON" -m dflash_tool train --store "$WORK/store" --out "$WORK/run" --draft-layers 2 --block-size 6 --anchors 16 \
  --gamma 1.5 --lr 1e-3 --batch-samples 8 --epochs 100 --max-steps "$STEPS" --val-fraction 0.02 \
  --val-every 140 --save-every 70

say "The folder to serve"
if [ -e "$WORK/drafter" ]; then
  echo "$WORK/drafter is there"
else
  "$PYTHON" -m dflash_tool export "$WORK/run" --out "$WORK/drafter"
fi
echo "For example: dflash eval --drafter $WORK/drafter --store $WORK/store --target $TARGET --data $WORK/held-out.jsonl"
echo "Serve it:    see docs/serving.md"
