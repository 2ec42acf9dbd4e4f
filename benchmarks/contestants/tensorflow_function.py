"""TensorFlow: `tf.distribute.MirroredStrategy` inside a `tf.function`."""

from _tensorflow import serve_tensorflow

if __name__ == "__main__":
    serve_tensorflow(compiled=True)
