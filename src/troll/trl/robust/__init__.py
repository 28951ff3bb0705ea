"""What keeps a long run alive, one mixin per concern; ``TROLLTrainer`` combines them with the method.

======================  ==============================================================================================
``checkpoints``         ``SafeCheckpoints``: staged, checksummed and renamed, so complete or absent. ``ExactResume``:
                        continues bit for bit, also inside a rollout. ``store`` has the folder of checkpoints and its
                        lock, ``state`` what is saved besides the model, ``fingerprint`` refuses changed settings.
``guards``              ``SkipInvalidUpdates``: an update with a non-finite loss or gradient is skipped and its batches
                        are saved.
``oom_retry``           ``OOMRetry``: an update that runs out of memory is repeated on smaller parts.
``reward_validation``   ``RewardValidation``: invalid rewards raise, or are masked and counted.
``interrupt``           ``StopOnSignal``: Ctrl-C finishes the update and saves a checkpoint.
======================  ==============================================================================================

They know the method only through the trust region's state, the old policies in a rollout, and ``_on_failed_check``.
"""
