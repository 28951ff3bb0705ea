"""Train a LoRA adapter on GSM8K with TROLL: the parameters of the model itself are not trained.

    python lora.py --tiny                     try it: no download, no GPU, seconds
    python lora.py --lora_r 32                Qwen2.5-1.5B-Instruct on one GPU
    python lora.py --beta 0.001               with a reference KL: the model without its adapter, so no second model
    python lora.py --load_in_4bit             QLoRA, with bitsandbytes

Task, flags and settings are those of gsm8k.py (kl_bound 0.05); the learning rate is ten times as large. The adapter is
saved alone: load it with peft.AutoPeftModelForCausalLM.from_pretrained(output_dir).
"""

from __future__ import annotations

from gsm8k import SETTINGS, Task, model_options, parse, prepare, run
from peft import LoraConfig
from trl import get_quantization_config

from troll.trl import TROLLTrainer


def main() -> None:
    """Put the parts together."""
    task, args, model = parse(Task, {**SETTINGS, "output_dir": "gsm8k-troll-lora", "learning_rate": 1e-5}, __doc__)
    train, evaluation, rewards = prepare(task, args, model)
    args.model_init_kwargs = model_options(args, model)
    trainer = TROLLTrainer(
        model=model.model_name_or_path,
        reward_funcs=rewards,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        quantization_config=get_quantization_config(model),
        peft_config=LoraConfig(
            r=model.lora_r,
            lora_alpha=model.lora_alpha,
            target_modules=model.lora_target_modules or "all-linear",
            # A rollout is scored when it is made and again on every update. With dropout the two would differ by
            # chance, and the trust region would act on that. (TROLLConfig turns dropout off in any case.)
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        ),
    )
    trainer.model.print_trainable_parameters()
    run(trainer)


if __name__ == "__main__":
    main()
