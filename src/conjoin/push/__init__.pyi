from conjoin.push.collection import collection_upload as collection_upload
from conjoin.push.commit import PushError as PushError, Upload as Upload, push as push
from conjoin.push.dataset import dataset_upload as dataset_upload
from conjoin.push.metric import metric_upload as metric_upload
from conjoin.push.model import model_upload as model_upload
from conjoin.push.space import space_upload as space_upload
